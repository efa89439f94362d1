"""Methods on a mesh: what only a process with many devices can show. `test_devices.py` runs it on eight of a CPU.

``python -m tests.mesh.eight_devices check ...`` runs these checks and prints a JSON object: by the name of each, the text of
its exception, or null. A check is named by its function, or is an entry of `LAWS`, such as ``h2o on data=2 model=4``.
"""

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
from kvjax.attention import over_cache, patterns
from kvjax.cache import LayerStorage
from kvjax.cache import divided as parts
from kvjax.decoding.sampling import Sampler
from kvjax.mesh.sharding import place_rows
from kvjax.methods import Full, SnapKV, infinigen, tokenselect, tova, tovaonce
from kvjax.methods.chess import page_tree
from kvjax.methods.chess.method import PRINTED
from kvjax.methods.mosaickv import store as mosaic_store
from kvjax.methods.pariskv import divided
from kvjax.methods.sentencekv import method as sentence_module
from kvjax.methods.shadowkv import low_rank
from kvjax.protocol import families
from kvjax.testing.model import TinyModel
from kvjax.wrappers import Pattern, PerLayer
from models import Experts, LinearLayers, ModelConfig, sharding
from models.sizes.parts import LayerRope
from pallas_kernels import axes
from pallas_kernels.choose.kth_select import kth_select_mask
from pallas_kernels.query.tokenselect import step_query as step_query_module
from pallas_kernels.score.window_score import reference
from tests.harness import NAMES, WRAPPERS, any_example, example, knobs_of
from tests.mesh import eight_devices_experiments
from tests.mesh.processes import mesh_of, refused, report
from tests.tiny_models import vivid_params

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_q_heads=16, num_kv_heads=8, head_dim=8,
    max_position_embeddings=1024, qk_norm=True,
)  # fmt: skip
LAYERS = CONFIG.num_layers
STEPS = 8
LENGTHS = (40, 31, 22, 9, 48, 3, 17, 35)
QUESTIONS = ([5, 9, 2, 7], [8], [], [1, 2])
READS_CHUNKS = {"chunk_size": 16}  # and 48 slots of prompt
CHUNKED = ("h2o", "keydiff", "mosaickv", "quest")  # read their prompts in chunks where slots are not divided, too
# What the heads decide together: the arrays that are summed, beside the sums of each layer.
OF_HEADS = {
    "tova": LAYERS,  # attention mass
    "infllm": LAYERS,  # scores of blocks
    "infinigen": LAYERS,  # tokens near the maximum
    "periodic": LAYERS,  # tokens of the longest head, under a condition
    "rkv": LAYERS,
    "triattention": LAYERS,
    "tokenselect": 2 * LAYERS,  # cosines; votes under a condition
    **dict.fromkeys(("chess", "chess flat", "chess printed"), 1),  # scores of nodes under a condition
    "mosaickv dynamic": LAYERS,  # losses
}
# What crosses devices along ``slots`` in a decode step: the number of all-gathers and of all-reduces.
CROSSES = {
    "full": (LAYERS, 0),  # outputs
    "quest": (2 * LAYERS, 0),  # and each device's best pages
    "pariskv": (3 * LAYERS, LAYERS),  # and counts of votes, best estimates; the codes of the token that joins the zone
    "tokenselect": (3 * LAYERS, 0),  # and sums of exp under a condition, best tokens
    "chess": (LAYERS, 2),  # and vectors of pages under conditions
    "chess flat": (LAYERS, 2),
    "chess printed": (LAYERS, 2),
    "dense_below": (2 * LAYERS, 0),  # as Quest
}
# Written out, because what crosses is to be known.
# Of these the prompt is divided; or it is read in a bounded storage. Each device has all that is kept, and sends nothing.
BOUNDED = (
    "snapkv", "pyramidkv", "headkv", "adakv", "observedattention", "h2o", "sentencekv",
    "streamingllm", "keydiff", "stages", "per_layer", "layer_budgets",
)  # fmt: skip
KINDS = ("snapkv", "h2o", "sentencekv", "streamingllm", "stages")  # of these, a choice for speed
DIVIDED = {"key", "value", "position", "low", "high", "ids", "rows"}  # the arrays of a layer's state with an axis of slots


def _pattern(at, kind):
    numbers = {
        "columns": 1 + at % 3, "diagonals": 2 + at % 4, "blocks": 1 + at % 2,
        "share": 0.3 + 0.04 * at, "tau": float(at % 2), "min_budget": 2, "factor": 10.0 + at,
    }  # fmt: skip
    return Pattern(kind, **{name: numbers[name] for name in patterns.KINDS[kind]})


# Each device has some of them.
_HEADS = tuple(
    _pattern(at, kind) for at, kind in zip(range(CONFIG.num_q_heads), itertools.cycle(patterns.KINDS), strict=False)
)
VARIANTS = {
    "chess flat": lambda: example("chess", hierarchy=False),
    "chess printed": lambda: example("chess", **PRINTED),
    "sentencekv kv_head": lambda: example("sentencekv", prefilter="kv_head"),
    "mosaickv dynamic": lambda: example("mosaickv", strategy="dynamic", buffer=16, segment=32, lifetime=4.0),
    "reuse join": lambda: dataclasses.replace(WRAPPERS["reuse"], join=True),
    "reuse by head": lambda: dataclasses.replace(WRAPPERS["reuse"], head_map=(tuple(reversed(range(8))),) * LAYERS),
    "prefill by head": lambda: dataclasses.replace(WRAPPERS["prefill"], pattern=(_HEADS,) * CONFIG.num_layers),
}
# The keys of `CONFIG` are normalised without weights, so rounding decides which of them are Knorm's shortest.
# The loop of "verified" has two passes of the model, so it has other sums: see `check_verified`.
SUBJECTS = [name for name in (*NAMES, *WRAPPERS, *VARIANTS) if name not in ("knorm", "verified")]
OF_MESHES = {
    **dict.fromkeys(
        ("data=1 model=8", "data=2 model=4"), [x for x in SUBJECTS if x != "kvgrad"]
    ),  # whose gradient it refuses
    "data=8 model=1": SUBJECTS,
    **dict.fromkeys(("slots=4", "slots=2 model=4", "data=2 slots=4"), (*CROSSES, *BOUNDED)),
}
IN_TURNS = {  # a mesh and a method
    "quest": ("data=2 model=4", functools.partial(example, "quest")),
    "dense_below": ("slots=4", functools.partial(any_example, "dense_below")),
    "per_layer": ("slots=4", lambda: PerLayer(layers={0: Full()}, default=example("quest"))),
    **{name: ("slots=4", functools.partial(example, name)) for name in ("sentencekv", "pariskv", "tokenselect", "chess")},
}
SAVED = {  # the mesh of a cache, the methods -> other meshes that go on with it
    ("data=2 model=4", ("quest", "chess")): ("data=2 model=4", "data=1 model=8"),
    ("slots=4", (*CROSSES, *KINDS)): ("slots=4", "slots=2 model=4", "data=2 model=2"),
}


def alone(score, wanted, capacity, cache):
    return kth_select_mask(score, wanted, min(capacity, score.shape[2]))


def own(x, *_):
    return x


ALONE = types.SimpleNamespace(SLOTS="slots", is_split=lambda axis: False, index=lambda axis: 0)
SPLIT = types.SimpleNamespace(  # what is split, and neither summed nor joined
    total=own, mean=own, most=own, joined=own, MODEL="model", is_split=lambda axis: True, index=lambda axis: 0,
    size=lambda axis: 1,
)  # fmt: skip
# With theta=2 the devices, which disagree, all vote in every step; else some would wait for others for ever.
VOTING = functools.partial(example, "tokenselect", theta=2.0)
# What is forgotten: where, what is there instead, and the method; along slots, or along heads.
FORGOTTEN = {
    "outputs": (over_cache, "merged", lambda out, lse, cache: (out, lse), Full),
    "prompts": (parts, "merged", lambda out, lse, cache: (out, lse), Full),
    "pages": (families, "best_slots", alone, functools.partial(example, "quest")),
    "votes": (divided, "axes", ALONE, functools.partial(example, "pariskv")),
    "estimates": (divided, "best_slots", alone, functools.partial(example, "pariskv")),
    "codes": (divided, "total", own, functools.partial(example, "pariskv")),
    "sums": (tokenselect, "log_total", own, VOTING),
    "keys": (tokenselect, "total", own, VOTING),
    "vectors": (page_tree, "total", own, functools.partial(example, "chess")),
    "softmax": (reference, "axes", types.SimpleNamespace(most=own, total=own), functools.partial(example, "snapkv")),
    "kept": (parts, "total", own, functools.partial(example, "snapkv")),
}
FORGOTTEN_OF_HEADS = {
    "chess": (page_tree, functools.partial(example, "chess")),
    "tova": (tova, functools.partial(example, "tova")),
    "tovaonce": (tovaonce, functools.partial(example, "tovaonce")),
    "tokenselect": (tokenselect, functools.partial(example, "tokenselect")),
    "cosines": (step_query_module, functools.partial(example, "tokenselect", theta=0.0)),  # many are near the threshold
    "sentencekv": (sentence_module, lambda: method_of("sentencekv")),
    "mosaickv": (mosaic_store, lambda: method_of("mosaickv dynamic")),
    "shadowkv": (low_rank, functools.partial(example, "shadowkv")),
    "infinigen": (infinigen, functools.partial(example, "infinigen")),
}
LAWS = [
    *(f"{name} on {mesh}" for mesh, names in OF_MESHES.items() for name in names),
    *(f"{name} in turns" for name in IN_TURNS),
    *(f"{name} forgotten" for name in (*FORGOTTEN, *FORGOTTEN_OF_HEADS)),
    *(f"{name} saved on {mesh}" for mesh, names in SAVED for name in names),
]


def method_of(name):
    if name in VARIANTS:
        return VARIANTS[name]()
    return WRAPPERS[name] if name in WRAPPERS else example(name, **knobs_of(name, CONFIG.num_kv_heads))


@functools.cache
def params():
    return vivid_params(CONFIG, 1)


@functools.cache
def spread(text, kind=AxisType.Explicit):
    """The parameters on a mesh, for example ``data=2 model=4``: two groups of rows, each on four devices."""
    return sharding.shard_params(params(), mesh_of(text, kind))


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


def generated(given, method, rows=4, steps=STEPS, drawn=(), **options):
    """What `kvjax.generate` returns; ``drawn`` are its options."""
    cache = read(given, method, rows, **options)
    return kvjax.generate(given, cache, max_new_tokens=steps, eos_token_ids=(), **dict(drawn))


@functools.cache
def on_one_device(name, rows, options):
    logits = np.asarray(read(params(), method_of(name), rows, **dict(options)).logits)
    return logits, generated(params(), method_of(name), rows, **dict(options))


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


def is_storage(x):
    return isinstance(x, LayerStorage)


def assert_same_state(cache, one):
    """Every array of the state equals the array on one device, which has fewer free slots."""
    for state, other in zip((*cache.layers, cache.shared), (*one.layers, one.shared), strict=True):
        named, others = jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(other)
        position = [x.position for x in jax.tree.leaves(other, is_leaf=is_storage) if is_storage(x)]
        for (path, x), y in zip(named, others, strict=True):
            if path[-1].name == "vectors":  # of pages, then of chunks, which more free pages shift
                continue
            x, y = (np.asarray(a)[tuple(map(slice, np.minimum(x.shape, y.shape)))] for a in (x, y))
            if path[-1].name in ("key", "value"):  # padding is written on one device only
                held = np.asarray(position[0])[:, :, : x.shape[2], None] >= 0
                x, y = (np.where(held, a, 0) for a in (x, y))
            assert_same(x, y)


def assert_divided(cache, plan, divided):
    """A device has its part of the arrays ``divided``: keys, values, positions, metadata of slots and pages; else all."""
    for path, x in jax.tree_util.tree_leaves_with_path((cache.layers, cache.shared)):
        split = [axis for axis in x.sharding.spec if axis is not None]
        part = x.addressable_shards[0].data.nbytes
        assert part * math.prod(plan.mesh.shape[axis] for axis in split) == x.nbytes
        assert ("slots" in split) == (path[-1].name in divided), path
        assert ("model" in split) <= (plan.shards > 1) and ("data" in split) == (plan.groups > 1), path


def laws(name, text):
    """A method's tokens, statistics, state, collectives, donation and bytes per device."""
    given, slots = spread(text), "slots" in text
    rows = 8 if "data=8" in text else 4
    options = READS_CHUNKS if slots or name in CHUNKED else {}
    logits, one = on_one_device(name, rows, tuple(options.items()))
    cache = read(given, method_of(name), rows, **options)
    plan, before = cache.plan, jax.tree.leaves(cache)
    np.testing.assert_allclose(cache.logits, logits, atol=2e-4)
    assert_copies_are_equal(cache)
    program, end, stats = decoded(given, cache)
    assert_copies_are_equal(end.cache)
    np.testing.assert_array_equal(end.tokens, one.tokens)
    assert all(x.is_deleted() for x in before if x.size), "not every array was donated"
    if slots:
        for field in ("attended", "kv_bytes", "metadata_bytes"):
            np.testing.assert_allclose(vars(stats)[field], vars(one.stats)[field], rtol=1e-6)
        assert_same(stats.counters, one.stats.counters)
        assert_same_state(end.cache, one.cache)
        assert_divided(end.cache, plan, set() if name in BOUNDED else DIVIDED)
    else:
        assert_same(dataclasses.replace(stats, weight_bytes=one.stats.weight_bytes), one.stats)
        assert_split(without_copies(name, end.cache), 8)
    found = collectives(program)
    gathered, summed = CROSSES.get(name, (0, 0)) if slots else (0, 0)
    if plan.shards > 1:  # logits; embedding, and what heads and parts of F compute
        lists = 2 * (name in ("reuse join", "reuse by head"))  # slots and mask of an anchor
        gathered, summed = gathered + 1 + lists, summed + 2 * LAYERS + 1 + OF_HEADS.get(name, 0)
    expected = {kind: count for kind, count in (("all-gather", gathered), ("all-reduce", summed)) if count}
    assert {kind: len(sizes) for kind, sizes in found.items()} == expected, found
    if slots:
        held = next(x for x in jax.tree.leaves(end.cache.layers, is_leaf=is_storage) if is_storage(x))
        most = held.num_slots * CONFIG.num_kv_heads * CONFIG.head_dim - 1
    else:
        widths = (x.shape[2] for x in jax.tree.leaves((end.cache.layers, end.cache.shared)) if x.ndim > 2)
        most = rows // plan.groups * max(CONFIG.vocab_size, CONFIG.num_q_heads * CONFIG.head_dim, *widths)
    assert max([0, *(max(sizes) for sizes in found.values())]) <= most, found


def turns(given, method):
    """`extend`, `decode_step`, `generate` with an EOS and limits, `fork`, `stream`, in turns."""
    cache = kvjax.extend(given, read(given, method), QUESTIONS)
    cache = kvjax.decode_step(given, cache, [1, 2, 3, 4], active=[True, False, True, True])
    copy = kvjax.fork(cache, 2)
    out = kvjax.generate(given, cache, max_new_tokens=6, eos_token_ids=(3, 12), limits=[6, 2, 6, 0])
    pieces = list(kvjax.stream(given, copy, max_new_tokens=10, eos_token_ids=(12,), block=5))
    return pieces, [np.asarray(x) for x in (out.tokens, out.num_tokens, measure(out.cache).bytes_read)]


def calls(name):
    """With Auto axes. Along slots the prompt is one chunk, and rows grow from one device to the next."""
    mesh, method = IN_TURNS[name]
    here, there = (turns(given, method()) for given in (params(), spread(mesh, AxisType.Auto)))
    assert here[0] == there[0]
    for one, other in zip(here[1], there[1], strict=True):
        np.testing.assert_allclose(one, other)


def saved(name, text):
    """A cache that was saved by one device, or by some, goes on with others, or with one, which need not be the first."""

    def goes_on(given, cache):
        return np.asarray(kvjax.generate(given, cache, max_new_tokens=6).tokens)

    method, others = method_of(name), next(x for (mesh, _), x in SAVED.items() if mesh == text)
    one, last = kvjax.extend(params(), read(params(), method), QUESTIONS), jax.device_put(params(), jax.devices()[-1])
    want = goes_on(params(), kvjax.fork(one))
    with tempfile.TemporaryDirectory() as folder:
        for place, cache in (("one", one), ("some", kvjax.extend(spread(text), read(spread(text), method), QUESTIONS))):
            kvjax.save_cache(f"{folder}/{place}", cache)
            for given in (params(), last, *(spread(mesh, AxisType.Auto) for mesh in others)):
                if place == "one" and "slots" in text and given is not params() and given is not last:
                    continue  # a row of one device may have a number of slots that no parts have
                loaded = kvjax.load_cache(f"{folder}/{place}", config=CONFIG, method=method, params=given)
                if name == "chess" and (plan := loaded.plan) is not None and plan.shards > 1 and plan.parts > 1:
                    # Wrong vectors of pages often choose the same pages.
                    made = kvjax.extend(given, read(given, method), QUESTIONS)
                    got, expected = loaded.shared.tree.pages, made.shared.tree.pages  # parts may have room for more pages
                    np.testing.assert_allclose(got[:, : expected.shape[1]], expected, atol=1e-4)
                np.testing.assert_array_equal(goes_on(given, loaded), want)


def forgotten(name):
    """Without an exchange between devices, a law does not hold."""
    of_slots = name in FORGOTTEN
    module, attribute, instead, method = FORGOTTEN[name] if of_slots else (None,) * 4
    if not of_slots:
        (module, method), attribute, instead = FORGOTTEN_OF_HEADS[name], "axes", SPLIT
    mesh, options = ("slots=4", READS_CHUNKS) if of_slots else ("data=1 model=8", {})
    jax.clear_caches()
    # Devices that disagree whether to vote would wait for each other for ever: here they vote in every step.
    votes = mock.patch.object(tokenselect, "_voted", lambda score, asked: axes.total(score))
    with mock.patch.object(module, attribute, instead), votes if name == "cosines" else contextlib.nullcontext():
        there = decoded(spread(mesh), read(spread(mesh), method(), **options))[1]
    jax.clear_caches()
    here = decoded(params(), read(params(), method(), **options))[1]
    try:
        assert_copies_are_equal(there.cache)
        np.testing.assert_array_equal(there.tokens, here.tokens)
        np.testing.assert_allclose(there.cache.logits, here.cache.logits, atol=2e-4)
        if not of_slots:
            assert_same((there.cache.layers, there.cache.shared), (here.cache.layers, here.cache.shared))
    except AssertionError:
        return
    raise AssertionError(f"nothing notices that {attribute} of {module.__name__} exchanges nothing")


def check_samples():
    """The same tokens and log-probabilities on any mesh, whose rows draw different ones; given tokens score the same."""
    drawn = {"temperature": 1.0, "top_k": 20, "key": jax.random.key(3), "logprobs": True, "top_logprobs": 2}
    options, meshes = {"steps": 4, "drawn": drawn}, [spread(text) for text in ("data=2 model=4", "data=4 model=2")]
    here, *others = (generated(given, Full(), **options) for given in (params(), *meshes))
    assert len({tuple(row) for row in here.tokens.tolist()}) == 4
    for given, there in zip(meshes, others, strict=True):
        np.testing.assert_array_equal(there.tokens, here.tokens)
        assert_same(there.logprobs, here.logprobs)
        assert_same(kvjax.score(given, read(given, Full()), np.asarray(here.tokens)), here.logprobs.model)
    sampler = Sampler(temperature=1.0, repetition_penalty=1.2, presence_penalty=0.5, no_repeat_ngram=2)
    drawn = {"sampler": sampler.read([[1, 2, 1], [], [3], [4]]), "key": jax.random.split(jax.random.key(0), 4)}
    for method in (Full(), kvjax.Verified(draft=example("h2o"), depth=3)):
        here, there = (generated(given, method, steps=4, drawn=drawn) for given in (params(), meshes[0]))
        np.testing.assert_array_equal(there.tokens, here.tokens)
        assert_same(there.sampler, here.sampler)


def check_verified():
    """Full's tokens on a mesh that divides rows, heads and slots, under a draft with Full's storage and one with its own."""
    given = spread("data=2 model=2 slots=2")
    for drawn in ({}, {"temperature": 1.0, "key": jax.random.key(3), "logprobs": True}):
        want = generated(params(), Full(), drawn=drawn)
        for draft in (example("quest", num_dense_layers=0), example("h2o")):
            out = generated(given, kvjax.Verified(draft=draft, depth=3), drawn=drawn)
            np.testing.assert_array_equal(out.tokens, want.tokens)
            assert_same(out.logprobs, want.logprobs)


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


def check_layers_first():
    """A prompt that is read layer by layer makes the same cache where rows, heads or slots are divided."""
    for text, name in (("data=2 model=4", "snapkv"), ("data=2 slots=2 model=2", "quest"), ("slots=4", "snapkv")):
        given, method = spread(text), method_of(name)
        one, other = (read(given, method, order=order, **READS_CHUNKS) for order in ("layers", "chunks"))
        assert_same((one.layers, one.logits), (other.layers, other.logits))


def check_programs_ahead():
    """`lower_programs` lowers what the calls run."""
    given, method = spread("data=2 model=4"), example("tova")
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
    here, there = (calibrate_chess(p, [[1, 2, 3], [4] * 9], **options) for p in (params(), spread("data=2 model=4")))
    np.testing.assert_allclose(there.tau_entropy, here.tau_entropy, rtol=1e-4)
    np.testing.assert_allclose(there.tau_varentropy, here.tau_varentropy, rtol=1e-4)


def check_sweep():
    settings = [SnapKV(budget=b, capacity=16, obs_window=4) for b in (8, 16)]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, n).tolist() for n in LENGTHS[:4]]
    options = {"config": CONFIG, "max_new_tokens": 6, "eos_token_ids": ()}
    for questions in (QUESTIONS, None):
        here, there = (
            kvjax.sweep(p, prompts, settings, questions=questions, **options) for p in (params(), spread("data=2 model=4"))
        )
        for one, other in zip(here, there, strict=True):
            np.testing.assert_array_equal(one.tokens, other.tokens)
            assert_same(one.stats, other.stats)


def check_offloaded():
    """Rows in host memory: a device's part of them."""
    dynamic = {"strategy": "dynamic", "buffer": 16, "segment": 32}
    names = "quest", "tokenselect", "shadowkv", "retroinfer", "retrievalattention"
    for name, knobs in (*((name, {}) for name in names), ("mosaickv", dynamic)):
        method, given = example(name, offload=True, **knobs), spread("data=2 model=4")
        here, cache = generated(params(), method, **READS_CHUNKS), read(given, method, **READS_CHUNKS)
        before = jax.tree.leaves(cache.layers)
        there = kvjax.generate(given, cache, max_new_tokens=STEPS, eos_token_ids=())
        np.testing.assert_array_equal(there.tokens, here.tokens)
        assert there.stats.host_bytes == here.stats.host_bytes > 0
        hosted = [x for x in jax.tree.leaves(there.cache.layers) if x.sharding.memory_kind == "pinned_host"]
        assert all(x.sharding.shard_shape(x.shape)[:2] == (2, 2) for x in hosted)
        assert all(x.is_deleted() for x in before)


def check_codes():
    """Keys and values in codes, read in one chunk and in several, in host memory too, and saved on another mesh."""
    heads, slots = ("data=2 model=4", "data=1 model=8"), ("slots=4", "slots=2 model=4")
    cases = [(method_of("h2o"), "int8", True, heads, 8), (example("quest", offload=True), "k8v4", True, heads, 8)]
    for name in (*CROSSES, *KINDS):
        chunked = name in ("quest", "pariskv", "h2o", "streamingllm")
        cases.append((method_of(name), "int8", chunked, slots, None if name in BOUNDED else 4))
    for method, kind, chunked, meshes, devices in cases:
        options = {"kv_dtype": kind} | (READS_CHUNKS if chunked else {})
        here, cache = generated(params(), method, **options), read(spread(meshes[0]), method, **options)
        with tempfile.TemporaryDirectory() as folder:
            kvjax.save_cache(f"{folder}/cache", cache)
            loaded = kvjax.load_cache(f"{folder}/cache", config=CONFIG, method=method, params=spread(meshes[1]))
        for mesh, made in zip(meshes, (cache, loaded), strict=True):
            there = kvjax.generate(spread(mesh), made, max_new_tokens=STEPS, eos_token_ids=())
            assert_copies_are_equal(there.cache)
            np.testing.assert_array_equal(there.tokens, here.tokens)
            if meshes is heads:
                assert there.stats.resident_bytes == here.stats.resident_bytes
                assert_split(there.cache, 8)
                continue
            held = next(x for x in jax.tree.leaves(there.cache.layers, is_leaf=is_storage) if is_storage(x))
            parts_of = made.plan.shards if devices is None else made.plan.mesh.size
            assert held.codes[0].codes.addressable_shards[0].data.nbytes * parts_of == held.codes[0].codes.nbytes


def check_codes_of_a_prompt():
    """Dividing slots moves codes and changes none: sums have the order that they have without the axis ``slots``."""
    for without, mesh in ((params(), "slots=4"), (spread("model=4"), "slots=2 model=4")):
        here, there = (read(given, Full(), kv_dtype="k8v4") for given in (without, spread(mesh)))
        for one, other in zip(here.layers, there.layers, strict=True):
            held = np.asarray(one.cache.valid)
            for x, y in zip(*(jax.tree.leaves(state.cache.codes) for state in (one, other)), strict=True):
                x, y = np.asarray(x), np.asarray(y)[:, :, : held.shape[2]]  # parts of equal size need more slots
                np.testing.assert_array_equal(x[held], y[held])


def check_window_scores():
    """`window_score` over the slots of all devices, of which there may be three, in both implementations."""
    from tests.pallas_kernels.score import test_window_score  # which computes when it is imported

    (query, key), where = test_window_score.problem(0, slots=96)
    want = test_window_score.oracle(query, key, **where)
    split = PartitionSpec(None, None, "slots")
    for name, devices in (("xla", 4), ("interpreted", 3)):
        mesh = jax.make_mesh((devices,), ("slots",), axis_types=(AxisType.Auto,))

        def run(query, key, asked, position, name=name):
            given = {"query_position": asked, "key_position": position, "scale": test_window_score.SCALE, "axis": "slots"}
            return test_window_score.RUN[name](query, key, **given)

        spread = jax.shard_map(
            run, mesh=mesh, in_specs=(PartitionSpec(), split, PartitionSpec(), split),
            out_specs=PartitionSpec(None, None, None, "slots"), check_vma=False,
        )  # fmt: skip
        got = jax.jit(spread)(query, key, where["query_position"], where["key_position"])
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)


def check_refusals():
    """What cannot run is refused in a sentence, before anything is compiled."""
    given = spread("data=2 model=4")
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
        kvjax.decoding.checks.check_params(spread("data=1 model=8"), cache)
    with refused("meshes of different axis types: .* with axes .*Explicit.* with axes .*Auto"):
        kvjax.decoding.checks.check_params(spread("data=2 model=4", AxisType.Auto), cache)
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

    given = spread("slots=4")
    for name in ("expectedattention", "mosaickv", "twilight", "prefill", "periodic", "reuse every token"):
        method = dataclasses.replace(WRAPPERS["reuse"], steps=1) if " " in name else any_example(name)
        with refused("cannot run over the mesh's axis 'slots'.*Full, Quest"):
            kvjax.prefill(given, [[1, 2]], config=CONFIG, method=method, max_new_tokens=8)
    with refused("KVgrad cannot run where a mesh divides the heads"):
        kvjax.prefill(spread("data=2 model=4"), [[1, 2, 3, 4], [5, 6, 7]], config=CONFIG, method=example("kvgrad"))
    with refused("Quest: offload must be False where the mesh's axis 'slots'"):
        kvjax.prefill(given, [[1, 2]], config=CONFIG, method=example("quest", offload=True), max_new_tokens=8)
    with refused("sweep does not run where the mesh's axis 'slots'"):
        kvjax.sweep(given, [[1, 2]], [Full()], config=CONFIG, max_new_tokens=8)


def check_saved_caches_that_do_not_fit():
    odd = kvjax.prefill(params(), [[1, 2]], config=CONFIG, method=example("quest"), max_new_tokens=7, pad_multiple=1)
    slots = r"has \d+ slots a row, expected a multiple of \d+ for the mesh slots=4, where"
    with tempfile.TemporaryDirectory() as folder:
        kvjax.save_cache(f"{folder}/odd", odd)
        for mesh, told in (("data=8 model=1", "rows of a batch must be a multiple of the 8 devices"), ("slots=4", slots)):
            with refused(told):
                kvjax.load_cache(f"{folder}/odd", config=CONFIG, method=example("quest"), params=spread(mesh))


def given_on(mesh):
    return {"a": jax.device_put(np.zeros(8, np.float32), NamedSharding(mesh, PartitionSpec("model")))}


def run(name):
    if name not in LAWS:
        CHECKS[name]()
    elif name.endswith((" in turns", " forgotten")):
        {"in turns": calls, "forgotten": forgotten}[name.split(maxsplit=1)[1]](name.split()[0])
    elif " saved on " in name:
        saved(*name.split(" saved on "))
    else:
        laws(*name.split(" on "))


CHECKS = {name: x for name, x in {**vars(eight_devices_experiments), **globals()}.items() if name.startswith("check_")}


if __name__ == "__main__":
    report(run, sys.argv[1:])
