"""Rows whose slots are divided over the devices of the axis ``slots``: checks for `eight_devices.py`, in a process like its.

``python -m tests.mesh.divided_rows check ...`` runs them. The law of a method on a mesh is named ``METHOD on slots=4``.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pathlib
import sys
import tempfile
import types
from unittest import mock

import jax
import numpy as np
from jax.sharding import AxisType, PartitionSpec

import kvjax
from kvjax.attention import over_cache
from kvjax.cache import LayerStorage
from kvjax.cache import divided as parts
from kvjax.methods import Full, tokenselect
from kvjax.methods.chess import page_tree
from kvjax.methods.pariskv import divided
from kvjax.protocol import families
from kvjax.wrappers import PerLayer
from models import sharding
from pallas_kernels.choose.kth_select import kth_select_mask
from pallas_kernels.score.window_score import reference
from tests.harness import any_example, example
from tests.mesh import eight_devices
from tests.mesh.eight_devices import (
    CONFIG,
    OF_HEADS,
    QUESTIONS,
    assert_copies_are_equal,
    assert_same,
    assert_same_turns,
    collectives,
    decoded,
    method_of,
    on_one_device,
    params,
    read,
    turns,
)
from tests.mesh.processes import mesh_of, refused, report
from tests.pallas_kernels.score import test_window_score

LAYERS = CONFIG.num_layers
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
MESHES = ("slots=4", "slots=2 model=4", "data=2 slots=4")
METHODS_OF_CALLS = {
    "sentencekv": functools.partial(example, "sentencekv"),
    "dense_below": functools.partial(any_example, "dense_below"),
    "per_layer": lambda: PerLayer(layers={0: Full()}, default=example("quest")),
    **{name: functools.partial(example, name) for name in ("pariskv", "tokenselect", "chess")},
}


def alone(score, wanted, capacity, cache):
    return kth_select_mask(score, wanted, min(capacity, score.shape[2]))


def own(x, axis):
    return x


ALONE = types.SimpleNamespace(SLOTS="slots", is_split=lambda axis: False, index=lambda axis: 0)
# With theta=2 the devices, which disagree, all vote in every step; else some would wait for others for ever.
VOTING = functools.partial(example, "tokenselect", theta=2.0)
FORGOTTEN = {  # what is forgotten: where, what is there instead, and the method
    "outputs": (over_cache, "merged", lambda out, lse, cache: (out, lse), Full),
    "prompts": (parts, "merged", lambda out, lse, cache: (out, lse), Full),
    "pages": (families, "best_slots", alone, functools.partial(example, "quest")),
    "votes": (divided, "axes", ALONE, functools.partial(example, "pariskv")),
    "estimates": (divided, "best_slots", alone, functools.partial(example, "pariskv")),
    "codes": (divided, "total", lambda x, cache: x, functools.partial(example, "pariskv")),
    "sums": (tokenselect, "log_total", lambda lse, cache: lse, VOTING),
    "keys": (tokenselect, "total", lambda x, cache: x, VOTING),
    "vectors": (page_tree, "total", lambda x, cache: x, functools.partial(example, "chess")),
    "softmax": (reference, "axes", types.SimpleNamespace(most=own, total=own), functools.partial(example, "snapkv")),
    "kept": (parts, "total", lambda x, cache: x, functools.partial(example, "snapkv")),
}
LAWS = [
    *(f"{name} on {mesh}" for mesh in MESHES for name in (*CROSSES, *BOUNDED)),
    *(f"{name} in turns" for name in METHODS_OF_CALLS),
    *(f"{name} forgotten" for name in FORGOTTEN),
    *(f"{name} saved" for name in (*CROSSES, *KINDS)),
]
READS_CHUNKS = {"chunk_size": 16}  # and 48 slots of prompt


@functools.cache
def spread(text, kind=AxisType.Explicit):
    """The parameters on a mesh, for example ``data=2 slots=4``."""
    return sharding.shard_params(params(), mesh_of(text, kind))


def laws(name, text):
    """A method's tokens, statistics, collectives, donation and bytes per device."""
    logits, one = on_one_device(name, 4, tuple(READS_CHUNKS.items()))
    given = spread(text)
    cache = read(given, method_of(name), **READS_CHUNKS)
    plan = cache.plan
    np.testing.assert_allclose(cache.logits, logits, atol=2e-4)
    assert_copies_are_equal(cache)
    before = jax.tree.leaves(cache)
    program, end, stats = decoded(given, cache)
    assert_copies_are_equal(end.cache)
    np.testing.assert_array_equal(end.tokens, one.tokens)
    np.testing.assert_allclose(stats.attended, one.stats.attended, rtol=1e-6)
    np.testing.assert_allclose(stats.kv_bytes, one.stats.kv_bytes, rtol=1e-6)
    np.testing.assert_allclose(stats.metadata_bytes, one.stats.metadata_bytes, rtol=1e-6)
    assert_same(stats.counters, one.stats.counters)
    assert_same_state(end.cache, one.cache)
    assert all(x.is_deleted() for x in before if x.size), "not every array was donated"
    assert_divided(end.cache, plan, set() if name in BOUNDED else DIVIDED)
    found = collectives(program)
    gathered, summed = CROSSES.get(name, (0, 0))
    if plan.shards > 1:
        gathered, summed = gathered + 1, summed + 2 * LAYERS + 1 + OF_HEADS.get(name, (0, 0))[0]
    expected = {"all-gather": gathered, "all-reduce": summed}
    assert {kind: len(sizes) for kind, sizes in found.items()} == {k: n for k, n in expected.items() if n}, found
    held = next(x for x in jax.tree.leaves(end.cache.layers, is_leaf=is_storage) if is_storage(x))
    slots = held.num_slots * CONFIG.num_kv_heads * CONFIG.head_dim
    assert max([0, *(max(sizes) for sizes in found.values())]) < slots, found


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


def is_storage(x):
    return isinstance(x, LayerStorage)


def assert_divided(cache, plan, divided):
    """A device has its part of the arrays ``divided``: keys, values, positions, metadata of slots and pages; else all."""
    for path, x in jax.tree_util.tree_leaves_with_path((cache.layers, cache.shared)):
        split = [axis for axis in x.sharding.spec if axis is not None]
        part = x.addressable_shards[0].data.nbytes
        assert part * math.prod(plan.mesh.shape[axis] for axis in split) == x.nbytes
        assert ("slots" in split) == (path[-1].name in divided), path
        assert ("model" in split) <= (plan.shards > 1) and ("data" in split) == (plan.groups > 1), path


def calls(name):
    """With Auto axes. The prompt is one chunk, and rows grow from one device to the next."""
    places = params(), spread("slots=4", AxisType.Auto)
    assert_same_turns(*(turns(given, METHODS_OF_CALLS[name](), streamed=10, block=5) for given in places))


def saved(name):
    """A cache that was saved by some devices goes on with others, or with one; what does not fit them is refused."""

    def goes_on(given, cache):
        return np.asarray(kvjax.generate(given, cache, max_new_tokens=6).tokens)

    with tempfile.TemporaryDirectory() as folder:
        kept = pathlib.Path(folder) / "kept"
        kvjax.save_cache(kept, kvjax.extend(spread("slots=4"), read(spread("slots=4"), method_of(name)), QUESTIONS))
        given = {"config": CONFIG, "method": method_of(name)}
        want = goes_on(params(), kvjax.load_cache(kept, **given))
        for mesh in ("slots=4", "slots=2 model=4", "data=2 model=2"):
            there = spread(mesh, AxisType.Auto)
            loaded = kvjax.load_cache(kept, **given, params=there)
            if (name, mesh) == ("chess", "slots=2 model=4"):  # wrong vectors of pages often choose the same pages
                made = kvjax.extend(there, read(there, method_of(name)), QUESTIONS)
                got, expected = loaded.shared.tree.pages, made.shared.tree.pages  # divided slots may have room for more pages
                np.testing.assert_allclose(got[:, : expected.shape[1]], expected, atol=1e-4)
            np.testing.assert_array_equal(goes_on(there, loaded), want)
        one = kvjax.extend(params(), read(params(), method_of(name)), QUESTIONS)
        np.testing.assert_array_equal(goes_on(params(), kvjax.fork(one)), want)
        odd = kvjax.prefill(params(), [[1, 2]], **given, max_new_tokens=7, pad_multiple=1)
        kvjax.save_cache(pathlib.Path(folder) / "odd", odd)
        refuses = refused(r"has \d+ slots a row, expected a multiple of \d+ for the mesh slots=4, where")
        with contextlib.nullcontext() if name in BOUNDED else refuses:
            kvjax.load_cache(pathlib.Path(folder) / "odd", **given, params=spread("slots=4"))


def forgotten(name):
    """Without an exchange between the parts of a row, a law does not hold."""
    module, function, instead, method = FORGOTTEN[name]
    jax.clear_caches()
    with mock.patch.object(module, function, instead):
        there = decoded(spread("slots=4"), read(spread("slots=4"), method(), **READS_CHUNKS))[1]
    jax.clear_caches()
    here = decoded(params(), read(params(), method(), **READS_CHUNKS))[1]
    try:
        assert_copies_are_equal(there.cache)
        np.testing.assert_array_equal(there.tokens, here.tokens)
        np.testing.assert_allclose(there.cache.logits, here.cache.logits, atol=2e-4)
    except AssertionError:
        return
    raise AssertionError(f"nothing notices that {function} exchanges nothing")


def check_divided_codes():
    """Keys and values in 8 bits, read in one chunk and in several, and saved on another mesh."""
    for name in (*CROSSES, *KINDS):
        options = {"kv_dtype": "int8"} | (READS_CHUNKS if name in ("quest", "pariskv", "h2o", "streamingllm") else {})
        here = decoded(params(), read(params(), method_of(name), **options))[1]
        cache = read(spread("slots=4"), method_of(name), **options)
        with tempfile.TemporaryDirectory() as folder:
            kvjax.save_cache(f"{folder}/cache", cache)
            given = spread("slots=2 model=4")
            loaded = kvjax.load_cache(f"{folder}/cache", config=CONFIG, method=method_of(name), params=given)
        for mesh, made in (("slots=4", cache), ("slots=2 model=4", loaded)):
            there = decoded(spread(mesh), made)[1]
            assert_copies_are_equal(there.cache)
            np.testing.assert_array_equal(there.tokens, here.tokens)
            held = next(x for x in jax.tree.leaves(there.cache.layers, is_leaf=is_storage) if is_storage(x))
            devices = made.plan.shards if name in BOUNDED else made.plan.mesh.size
            assert held.codes[0].codes.addressable_shards[0].data.nbytes * devices == held.codes[0].codes.nbytes


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
    (query, key), where = test_window_score.given(0, slots=96)
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


def check_divided_refusals():
    """What cannot run is refused in a sentence."""
    given = spread("slots=4")
    for name in ("expectedattention", "mosaickv", "twilight", "prefill", "periodic"):
        method = any_example(name)
        with refused("cannot run over the mesh's axis 'slots'.*Full, Quest"):
            kvjax.prefill(given, [[1, 2]], config=CONFIG, method=method, max_new_tokens=8)
    with refused("Quest: offload must be False where the mesh's axis 'slots'"):
        kvjax.prefill(given, [[1, 2]], config=CONFIG, method=example("quest", offload=True), max_new_tokens=8)
    with refused("sweep does not run where the mesh's axis 'slots'"):
        kvjax.sweep(given, [[1, 2]], [Full()], config=CONFIG, max_new_tokens=8)


def run(name):
    """A check of this file or of `eight_devices.py`."""
    if " on " in name and name in LAWS:
        laws(*name.split(" on "))
    elif name in LAWS:
        first, kind = name.split(maxsplit=1)
        {"in turns": calls, "forgotten": forgotten, "saved": saved}[kind](first)
    elif name in globals():
        globals()[name]()
    else:
        eight_devices.run(name)


if __name__ == "__main__":
    report(run, sys.argv[1:])
