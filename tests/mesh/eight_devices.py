"""Methods on a mesh: what only a process with many devices can show. `test_methods.py` runs it on eight of a CPU.

``python -m tests.mesh.eight_devices check ...`` runs these checks and prints a JSON object: by the name of each, the text of
its exception, or null. A check is named by its function, or ``METHOD on 2x4`` for the laws of a method on a mesh.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import sys
import tempfile
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import kvjax
from kvjax.api import programs
from kvjax.api.calibrate_chess import calibrate_chess
from kvjax.api.measure import measure
from kvjax.attention.patterns import KINDS
from kvjax.decoding.sampling import Sampler
from kvjax.mesh.sharding import place_rows
from kvjax.methods import Full, SnapKV
from kvjax.methods import infinigen as infinigen_module
from kvjax.methods import tokenselect as tokenselect_module
from kvjax.methods import tova as tova_module
from kvjax.methods import tovaonce as tovaonce_module
from kvjax.methods.chess import page_tree
from kvjax.methods.chess.method import PRINTED
from kvjax.methods.mosaickv import store as mosaic_store
from kvjax.methods.sentencekv import method as sentence_module
from kvjax.methods.shadowkv import low_rank
from kvjax.testing.model import TinyModel
from kvjax.wrappers import Pattern
from models import Experts, LinearLayers, ModelConfig, sharding
from models.sizes.parts import LayerRope
from pallas_kernels import axes
from pallas_kernels.query.tokenselect import step_query as step_query_module
from tests.harness import NAMES, WRAPPERS, example, knobs_of
from tests.mesh.processes import refused, report
from tests.tiny_models import vivid_params

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_q_heads=16, num_kv_heads=8, head_dim=8,
    max_position_embeddings=1024, qk_norm=True,
)  # fmt: skip
STEPS = 8
LENGTHS = (40, 31, 22, 9, 48, 3, 17, 35)
QUESTIONS = ([5, 9, 2, 7], [8], [], [1, 2])
CHUNKED = ("h2o", "keydiff", "mosaickv", "quest")  # read their prompts in chunks here, too
# What the heads decide together, beside the sums of each layer: (arrays that are summed, arrays that are gathered).
OF_HEADS = {
    "tova": (CONFIG.num_layers, 0),  # attention mass
    "infllm": (CONFIG.num_layers, 0),  # scores of blocks
    "infinigen": (CONFIG.num_layers, 0),  # tokens near the maximum
    "periodic": (CONFIG.num_layers, 0),  # tokens of the longest head, under a condition
    "rkv": (CONFIG.num_layers, 0),
    "triattention": (CONFIG.num_layers, 0),
    "tokenselect": (2 * CONFIG.num_layers, 0),  # cosines; votes under a condition
    **dict.fromkeys(("chess", "chess flat", "chess printed"), (1, 0)),  # scores of nodes under a condition
    "mosaickv dynamic": (CONFIG.num_layers, 0),  # losses
}


def _pattern(at, kind):
    numbers = {
        "columns": 1 + at % 3, "diagonals": 2 + at % 4, "blocks": 1 + at % 2,
        "share": 0.3 + 0.04 * at, "tau": float(at % 2), "min_budget": 2,
    }  # fmt: skip
    return Pattern(kind, **{name: numbers[name] for name in KINDS[kind]})


# Each device has some of them.
_HEADS = tuple(_pattern(at, kind) for at, kind in zip(range(CONFIG.num_q_heads), itertools.cycle(KINDS), strict=False))
VARIANTS = {
    "chess flat": lambda: example("chess", hierarchy=False),
    "chess printed": lambda: example("chess", **PRINTED),
    "sentencekv kv_head": lambda: example("sentencekv", prefilter="kv_head"),
    "mosaickv dynamic": lambda: example("mosaickv", strategy="dynamic", buffer=16, segment=32, lifetime=4.0),
    "prefill by head": lambda: dataclasses.replace(WRAPPERS["prefill"], pattern=(_HEADS,) * CONFIG.num_layers),
}
# The keys of `CONFIG` are normalised without weights, so rounding decides which of them are Knorm's shortest.
# The loop of "verified" has two passes of the model, so it has other sums: see `check_verified`.
SUBJECTS = [name for name in (*NAMES, *WRAPPERS, *VARIANTS) if name not in ("knorm", "verified")]
LAWS = [f"{name} on {mesh}" for mesh in ("1x8", "2x4", "8x1") for name in SUBJECTS]


def method_of(name):
    if name in VARIANTS:
        return VARIANTS[name]()
    return WRAPPERS[name] if name in WRAPPERS else example(name, **knobs_of(name, CONFIG.num_kv_heads))


@functools.cache
def params():
    return vivid_params(CONFIG, 1)


@functools.cache
def spread(shape, kind=AxisType.Explicit):
    """The parameters on a mesh, for example 2x4: two groups of rows, each on four devices."""
    mesh = jax.make_mesh(tuple(map(int, shape.split("x"))), ("data", "model"), axis_types=(kind, kind))
    return sharding.shard_params(params(), mesh)


def read(given, method, rows=4, **options):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, n).tolist() for n in LENGTHS[:rows]]
    return kvjax.prefill(given, prompts, config=CONFIG, method=method, max_new_tokens=24, pad_multiple=16, **options)


def decoded(given, cache):
    """The program of `kvjax.generate`, compiled, and what it returns; consumes the cache."""
    (done,) = place_rows(cache.plan, jnp.zeros((cache.batch,), bool))
    args = given, cache, Sampler(), None, jnp.zeros((0,), jnp.int32), done, None
    program = programs.generate_program.lower(*args, steps=STEPS, stop_early=False).compile()
    return program.as_text(), *program(*args)


@functools.cache
def on_one_device(name, rows, options):
    cache = read(params(), method_of(name), rows, **dict(options))
    logits = np.asarray(cache.logits)
    return logits, kvjax.generate(params(), cache, max_new_tokens=STEPS, eos_token_ids=())


def assert_same(tree, other, tolerance=2e-4):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for one, two in zip(*map(jax.tree.leaves, (tree, other)), strict=True):
        np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance)


def assert_copies_are_equal(cache):
    """Devices that say that they have the same numbers have the same bits."""
    for path, x in jax.tree_util.tree_leaves_with_path(cache):
        seen = {}
        for shard in x.addressable_shards:
            data = np.asarray(shard.data)
            first = seen.setdefault(str(shard.index), data)
            assert first.tobytes() == data.tobytes(), f"{jax.tree_util.keystr(path)} differs between devices"


def assert_split(cache, devices):
    """Every device has its part of the bytes; single numbers of a row are wherever the row is."""
    leaves = [x for x in jax.tree.leaves((cache.layers, cache.shared)) if x.ndim > 1]
    whole, part = (sum(x.nbytes for x in xs) for xs in (leaves, [x.addressable_shards[0].data for x in leaves]))
    assert whole / devices <= part <= 1.01 * whole / devices, f"{part} of {whole} bytes on each of {devices} devices"


def without_copies(name, cache):
    """The cache without the factor of ShadowKV's keys that all heads share: every device of a row has it."""
    if name != "shadowkv":
        return cache
    layers = [dataclasses.replace(x, shadow=dataclasses.replace(x.shadow, left=None)) for x in cache.layers]
    return dataclasses.replace(cache, layers=tuple(layers))


def collectives(program):
    """Of the loop of a compiled program: {kind: the elements of each array}. XLA may do several arrays in one operation."""
    found = {}
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    for line in program.splitlines():
        match = re.search(rf"= (.*?) ({kinds})(?:-start)?\(", line)
        if match and "while/body" in line:
            shapes = [[int(n) for n in dims.split(",") if n] for dims in re.findall(r"\[([\d,]*)\]", match[1])]
            found.setdefault(match[2], []).extend(map(math.prod, shapes))
    return found


def laws(name, shape, method=None):
    """Laws 1 to 5 of a method on a mesh; ``method`` replaces the example if it must not share programs with other tests."""
    groups, shards = map(int, shape.split("x"))
    rows = 8 if groups == 8 else 4
    options = {"chunk_size": 16} if name in CHUNKED else {}
    logits, one = on_one_device(name, rows, tuple(options.items()))
    given = spread(shape)
    cache = read(given, method_of(name) if method is None else method, rows, **options)
    np.testing.assert_allclose(cache.logits, logits, atol=2e-4)
    assert_copies_are_equal(cache)
    before = jax.tree.leaves(cache)
    program, end, stats = decoded(given, cache)
    assert_copies_are_equal(end.cache)
    np.testing.assert_array_equal(end.tokens, one.tokens)
    assert_same(dataclasses.replace(stats, weight_bytes=one.stats.weight_bytes), one.stats)
    assert_split(without_copies(name, end.cache), 8)
    assert all(x.is_deleted() for x in before if x.size), "not every array was donated"
    found = collectives(program)
    if shards == 1:
        assert not found, found
        return
    summed, gathered = OF_HEADS.get(name, (0, 0))
    expected = {"all-reduce": 2 * CONFIG.num_layers + 1 + summed, "all-gather": 1 + gathered}  # embedding; logits
    assert {kind: len(sizes) for kind, sizes in found.items()} == expected, found
    width = max(CONFIG.vocab_size, CONFIG.num_q_heads * CONFIG.head_dim, *state_slots(end.cache))
    assert max(max(sizes) for sizes in found.values()) <= rows // groups * width, found


def state_slots(cache):
    return [x.shape[2] for x in jax.tree.leaves((cache.layers, cache.shared)) if x.ndim > 2]


def turns(given, method, streamed=6, block=4):
    """`extend`, `decode_step`, `generate` with an EOS and limits, `fork`, `stream`, in turns."""
    cache = kvjax.extend(given, read(given, method), QUESTIONS)
    cache = kvjax.decode_step(given, cache, [1, 2, 3, 4], active=[True, False, True, True])
    copy = kvjax.fork(cache, 2)
    out = kvjax.generate(given, cache, max_new_tokens=6, eos_token_ids=(3, 12), limits=[6, 2, 6, 0])
    pieces = list(kvjax.stream(given, copy, max_new_tokens=streamed, eos_token_ids=(12,), block=block))
    return pieces, [np.asarray(x) for x in (out.tokens, out.num_tokens, measure(out.cache).bytes_read)]


def assert_same_turns(here, there):
    assert here[0] == there[0]
    for one, other in zip(here[1], there[1], strict=True):
        np.testing.assert_allclose(one, other)


def check_calls():
    """With Auto axes."""
    assert_same_turns(*(turns(given, example("quest")) for given in (params(), spread("2x4", AxisType.Auto))))


def check_samples():
    """The same tokens on any mesh, whose rows draw different ones."""

    def drawn(given):
        cache = read(given, Full())
        key = jax.random.key(3)
        return np.asarray(kvjax.generate(given, cache, max_new_tokens=4, temperature=1.0, top_k=20, key=key).tokens)

    here = drawn(params())
    assert len({tuple(row) for row in here.tolist()}) == 4
    np.testing.assert_array_equal(drawn(spread("2x4")), here)
    np.testing.assert_array_equal(drawn(spread("4x2")), here)


def check_verified():
    """Full's tokens on a mesh that divides rows, heads and slots, under a draft with Full's storage and one with its own."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "model", "slots"), axis_types=(AxisType.Explicit,) * 3)
    given, drawn = sharding.shard_params(params(), mesh), {"temperature": 1.0, "key": jax.random.key(3)}
    for options in ({}, drawn):
        want = kvjax.generate(params(), read(params(), Full()), max_new_tokens=STEPS, eos_token_ids=(), **options)
        for draft in (example("quest", num_dense_layers=0), example("h2o")):
            cache = read(given, kvjax.Verified(draft=draft, depth=3))
            out = kvjax.generate(given, cache, max_new_tokens=STEPS, eos_token_ids=(), **options)
            np.testing.assert_array_equal(out.tokens, want.tokens)


def check_models():
    """Experts, biases, windows, linear attention, parts of other families; another method's numbers in the caller's jit."""
    experts = Experts(num_experts=4, num_experts_per_tok=2, intermediate_size=16, norm_topk_prob=True, layers=(1,))
    method, other = (example("quest", capacity=12, budget=budget) for budget in (12, 8))
    ropes = (LayerRope(theta=1e3, rotated=0), LayerRope(theta=1e3, rotated=4))
    after = {"wide_qk_norm": True, "qk_norm": False, "norm_place": "after", "ropes": ropes, "embedding_multiplier": 3.0}
    beside = {"norm": "layer", "norm_place": "parallel", "query_scale": 0.2, "logit_softcap": 5.0}
    moved = {"experts": experts, "windows": (None, 16)}, {"qkv_bias": True, "tie_word_embeddings": True}
    shared = {"experts": dataclasses.replace(experts, shared_size=8), "output_gate": True}
    sizes = {"num_key_heads": 4, "num_value_heads": 8, "key_dim": 6, "value_dim": 4, "conv_width": 4}
    linear = {**shared, "linear": LinearLayers(**sizes, layers=(0,))}
    for changes in (*moved, after, beside, linear):
        config = dataclasses.replace(CONFIG, **changes)
        whole = vivid_params(config, 2)
        parts = sharding.shard_params(whole, jax.make_mesh((2, 4), ("data", "model")))
        prompts = [[*range(n)] for n in LENGTHS[:4]]

        @jax.jit
        def go_on(given, cache):
            out = kvjax.generate(given, cache, method=other, max_new_tokens=STEPS, eos_token_ids=())
            return out.tokens, out.cache.logits

        options = {"config": config, "method": method, "max_new_tokens": 24, "pad_multiple": 16}
        here, there = (go_on(given, kvjax.prefill(given, prompts, **options)) for given in (whole, parts))
        np.testing.assert_array_equal(there[0], here[0])
        np.testing.assert_allclose(there[1], here[1], atol=2e-4)


def check_knorm():
    """Knorm where keys have a length of their own: the keys of `CONFIG` are all equally long."""
    config = dataclasses.replace(CONFIG, qk_norm=False)
    whole, prompts = vivid_params(config, 1), [[*range(1, n + 1)] for n in LENGTHS]
    options = {"config": config, "method": method_of("knorm"), "max_new_tokens": 24, "pad_multiple": 16}
    here = kvjax.generate(whole, kvjax.prefill(whole, prompts, **options), max_new_tokens=STEPS, eos_token_ids=())
    for shape in ((1, 8), (2, 4), (8, 1)):
        given = sharding.shard_params(whole, jax.make_mesh(shape, ("data", "model")))
        there = kvjax.generate(given, kvjax.prefill(given, prompts, **options), max_new_tokens=STEPS, eos_token_ids=())
        np.testing.assert_array_equal(there.tokens, here.tokens)
        assert_same(there.cache.layers, here.cache.layers)


def check_own_model():
    """A model that does not say how it is divided runs where the mesh divides rows or slots only, of both axis types."""
    model = TinyModel()
    whole, prompts = model.random_params(), [[*range(1, n)] for n in LENGTHS[:4]]
    options = {"config": model, "max_new_tokens": 8, "pad_multiple": 16, "chunk_size": 16}
    for name in ("quest", "snapkv"):
        here = kvjax.generate(whole, kvjax.prefill(whole, prompts, method=example(name), **options), max_new_tokens=6)
        for axis, kind in (("data", AxisType.Explicit), ("slots", AxisType.Auto)):
            mesh = jax.make_mesh((4,), (axis,), axis_types=(kind,))
            given = jax.device_put(whole, NamedSharding(mesh, PartitionSpec()))
            cache = kvjax.prefill(given, prompts, method=example(name), **options)
            assert cache.plan.mesh.shape == {axis: 4}
            np.testing.assert_array_equal(kvjax.generate(given, cache, max_new_tokens=6).tokens, here.tokens)


def check_programs_ahead():
    """`lower_programs` lowers what the calls run."""
    given, method = spread("2x4"), example("tova")
    sizes = {"rows": 4, "length": 40, "room": 24, "max_new_tokens": STEPS, "num_eos": 0, "pad_multiple": 16}
    prefill, generate = programs.lower_programs(given, config=CONFIG, methods=[method], **sizes)
    cache = read(given, method)
    (done,) = place_rows(cache.plan, jnp.zeros((4,), bool))
    tokens, lengths = place_rows(cache.plan, jnp.zeros((4, 48), jnp.int32), cache.length)
    static = {"model": CONFIG, "max_new_tokens": 24, "chunk_size": 8192, "plan": cache.plan}
    ran = programs.prefill_program.lower(given, tokens, lengths, (method,), **static)
    assert prefill.as_text() == ran.as_text()
    args = given, cache, Sampler(), None, jnp.zeros((0,), jnp.int32), done, None
    ran = programs.generate_program.lower(*args, steps=STEPS, stop_early=False)
    assert generate.as_text() == ran.as_text()


def check_calibration():
    options = {"config": CONFIG, "method": example("chess"), "max_new_tokens": 12, "eos_token_ids": ()}
    here, there = (calibrate_chess(p, [[1, 2, 3], [4] * 9], **options) for p in (params(), spread("2x4")))
    np.testing.assert_allclose(there.tau_entropy, here.tau_entropy, rtol=1e-4)
    np.testing.assert_allclose(there.tau_varentropy, here.tau_varentropy, rtol=1e-4)


def check_sweep():
    settings = [SnapKV(budget=b, capacity=16, obs_window=4) for b in (8, 16)]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, n).tolist() for n in LENGTHS[:4]]
    options = {"config": CONFIG, "max_new_tokens": 6, "eos_token_ids": ()}
    for questions in (QUESTIONS, None):
        here, there = (kvjax.sweep(p, prompts, settings, questions=questions, **options) for p in (params(), spread("2x4")))
        for one, other in zip(here, there, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            assert_same(one.stats, other.stats)


def check_saved_caches():
    """Saved on a mesh, loaded on one device and on another mesh; and the other way round."""
    for method in (example("quest"), example("chess")):
        first, second = read(params(), method), read(spread("2x4"), method)
        expected = np.asarray(kvjax.generate(params(), kvjax.fork(first), max_new_tokens=4).tokens)
        with tempfile.TemporaryDirectory() as folder:
            for number, cache in enumerate((first, second)):
                kvjax.save_cache(f"{folder}/{number}", cache)
                for given in (params(), spread("2x4"), spread("1x8")):
                    loaded = kvjax.load_cache(f"{folder}/{number}", config=CONFIG, method=method, params=given)
                    np.testing.assert_array_equal(kvjax.generate(given, loaded, max_new_tokens=4).tokens, expected)
            with refused("rows of a batch must be a multiple of the 8 devices"):
                kvjax.load_cache(f"{folder}/0", config=CONFIG, method=method, params=spread("8x1"))


def check_offloaded():
    """Rows in host memory: a device's part of them."""
    dynamic = {"strategy": "dynamic", "buffer": 16, "segment": 32}
    names = "quest", "tokenselect", "shadowkv", "retroinfer", "retrievalattention"
    for name, knobs in (*((name, {}) for name in names), ("mosaickv", dynamic)):
        method = example(name, offload=True, **knobs)
        here = kvjax.generate(params(), read(params(), method, chunk_size=16), max_new_tokens=STEPS, eos_token_ids=())
        cache = read(spread("2x4"), method, chunk_size=16)
        before = jax.tree.leaves(cache.layers)
        there = kvjax.generate(spread("2x4"), cache, max_new_tokens=STEPS, eos_token_ids=())
        np.testing.assert_array_equal(there.tokens, here.tokens)
        assert there.stats.host_bytes == here.stats.host_bytes > 0
        hosted = [x for x in jax.tree.leaves(there.cache.layers) if x.sharding.memory_kind == "pinned_host"]
        assert all(x.sharding.shard_shape(x.shape)[:2] == (2, 2) for x in hosted)
        assert all(x.is_deleted() for x in before)


def check_kv_dtype():
    """Keys and values as codes: a device's part of codes and scales, in host memory too, and of a cache that was saved."""
    for method, kind in ((method_of("h2o"), "int8"), (example("quest", offload=True), "k8v4")):
        options = {"kv_dtype": kind, "chunk_size": 16}
        here = kvjax.generate(params(), read(params(), method, **options), max_new_tokens=STEPS, eos_token_ids=())
        cache = read(spread("2x4"), method, **options)
        with tempfile.TemporaryDirectory() as folder:
            kvjax.save_cache(f"{folder}/cache", cache)
            loaded = kvjax.load_cache(f"{folder}/cache", config=CONFIG, method=method, params=spread("1x8"))
        for given, made in ((spread("2x4"), cache), (spread("1x8"), loaded)):
            there = kvjax.generate(given, made, max_new_tokens=STEPS, eos_token_ids=())
            np.testing.assert_array_equal(there.tokens, here.tokens)
            assert there.stats.resident_bytes == here.stats.resident_bytes
            assert_split(there.cache, 8)


def check_forgotten_sums():
    """Each sum over heads: without it, a law does not hold."""
    nothing = {name: lambda x, *_: x for name in ("total", "mean", "most")}
    split = {"is_split": lambda axis: True, "MODEL": "model", "index": lambda axis: 0, "joined": lambda x, *_: x}
    split["size"] = lambda axis: 1
    none = types.SimpleNamespace(**nothing, **split)
    # At theta=0 many cosines are near the threshold.
    cases = {
        "chess": (page_tree, example("chess")),
        "tova": (tova_module, example("tova")),
        "tovaonce": (tovaonce_module, example("tovaonce")),
        "tokenselect": (tokenselect_module, example("tokenselect")),
        "tokenselect cosine": (step_query_module, example("tokenselect", theta=0.0)),
        "sentencekv": (sentence_module, method_of("sentencekv")),
        "mosaickv dynamic": (mosaic_store, method_of("mosaickv dynamic")),
        "shadowkv": (low_rank, example("shadowkv")),
        "infinigen": (infinigen_module, example("infinigen")),
    }
    for name, (module, method) in cases.items():
        jax.clear_caches()
        # Devices that disagree whether to vote would wait for each other for ever: here they vote in every step.
        votes = mock.patch.object(tokenselect_module, "_voted", lambda score, asked: axes.total(score))
        with mock.patch.object(module, "axes", none), votes if "cosine" in name else contextlib.nullcontext():
            cache = read(spread("1x8"), method)
            end = decoded(spread("1x8"), cache)[1]
        try:
            assert_copies_are_equal(end.cache)
            here = decoded(params(), read(params(), method))[1]
            np.testing.assert_array_equal(end.tokens, here.tokens)
            assert_same((end.cache.layers, end.cache.shared), (here.cache.layers, here.cache.shared))
        except AssertionError:
            continue
        raise AssertionError(f"{name}: nothing notices that a sum is missing")
    jax.clear_caches()


def check_refusals():
    """What cannot run is refused in a sentence, before anything is compiled."""
    given = spread("2x4")
    with refused("the rows of a batch must be a multiple of the 2 devices of the mesh's axis 'data', got 3 rows"):
        kvjax.prefill(given, [[1], [2], [3]], config=CONFIG, max_new_tokens=8)
    mesh = jax.make_mesh((1, 8), ("data", "model"))
    narrow = dataclasses.replace(CONFIG, num_q_heads=4, num_kv_heads=4)
    with refused("num_kv_heads=4.* can be split over 1 or 2 or 4 devices .*, got 8"):
        kvjax.prefill(given_on(mesh), [[1]], config=narrow, max_new_tokens=8)
    tiny = TinyModel(num_kv_heads=8, num_q_heads=8)
    with refused("TinyModel has no method local"):
        kvjax.prefill(given_on(mesh), [[1]], config=tiny, max_new_tokens=8)
    whole = jax.device_put({"a": np.zeros(8, np.float32)}, NamedSharding(mesh, PartitionSpec()))
    with refused("must be split along 'model' and only there.* got parameters that are split along no axis"):
        kvjax.prefill(whole, [[1]], config=CONFIG, max_new_tokens=8)
    with refused("all parameters must be on the mesh data=1 x model=8, got .*'b'"):
        kvjax.prefill({**given_on(mesh), "b": jnp.zeros(3)}, [[1]], config=CONFIG, max_new_tokens=8)
    cache = jax.eval_shape(lambda: kvjax.decoding.layers.blank_cache(Full(), CONFIG, plan=kvjax.mesh.sharding.plan_of(given)))
    with refused("this cache is on the mesh data=2 x model=4, and the parameters are on one device"):
        kvjax.decoding.checks.check_params(params(), cache)
    with refused("and the parameters are on the mesh data=1 x model=8"):
        kvjax.decoding.checks.check_params(spread("1x8"), cache)
    with refused("meshes of different axis types: .* with axes .*Explicit.* with axes .*Auto"):
        kvjax.decoding.checks.check_params(spread("2x4", AxisType.Auto), cache)
    other = Mesh(mesh.devices.reshape(2, 4)[::-1], ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with refused("on different devices, or in a different device order"):
        kvjax.decoding.checks.check_params(sharding.shard_params(params(), other), cache)
    leaves, tree = jax.tree.flatten(given)
    at = next(i for i, x in enumerate(leaves) if x.sharding.spec == PartitionSpec(None, "model"))
    leaves[at] = jax.device_put(leaves[at], NamedSharding(leaves[at].sharding.mesh, PartitionSpec("model", None)))
    with refused("split in another way .*: 1 of them, the first one by .*'model', None.*, expected .*None, 'model'"):
        kvjax.decoding.checks.check_params(jax.tree.unflatten(tree, leaves), cache)
    foreign = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Explicit,))
    with refused("Explicit axes must be on one with the axes 'data', 'model' and 'slots'.*got the axes .'tp',"):
        kvjax.mesh.sharding.plan_of(jax.device_put(params(), NamedSharding(foreign, PartitionSpec())))


def given_on(mesh):
    return {"a": jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, PartitionSpec("model")))}


def run(name):
    if name in LAWS:
        laws(*name.split(" on "))
    else:
        globals()[name]()


if __name__ == "__main__":
    report(run, sys.argv[1:])
