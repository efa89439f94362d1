"""Methods on a mesh of two processes with two devices each; `test_methods.py` runs it twice.

``python -m tests.mesh.two_processes NUMBER PORT DIRECTORY CHECK ...``: every process also computes by itself, on one of its
devices, what is expected. A check is ``METHOD on MESH`` or the name of a function.
"""

from __future__ import annotations

import functools
import pathlib
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import kvjax
import models
from kvjax.api.measure import measure
from kvjax.mesh.processes import least, readable
from kvjax.methods import Full
from tests.harness import example
from tests.mesh.eight_devices import CONFIG, LENGTHS, QUESTIONS, STEPS, assert_same, params
from tests.mesh.processes import mesh_of, one_of_two, refused

METHODS = ("full", "snapkv", "quest", "pariskv")
MESHES = ("data=2 model=2", "slots=2 model=2", "data=2 slots=2", "slots=4")
CHECKS = [f"{name} on {mesh}" for mesh in MESHES for name in METHODS] + [
    "check_calls", "check_offloaded", "check_saved", "check_refusals",
]  # fmt: skip
SAVED_BY_ONE, SAVED_BY_TWO = "saved_by_one", "saved_by_two"
DIRECTORY = pathlib.Path(sys.argv[3]) if len(sys.argv) > 3 else pathlib.Path()


@functools.cache
def spread(text, kind=AxisType.Explicit):
    """The parameters on a mesh, for example ``data=2 model=2``, each part read from the file by its process."""
    return models.from_pretrained(DIRECTORY / "model", mesh=mesh_of(text, kind))[0]


def read(given, method):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 60, n).tolist() for n in LENGTHS[:4]]
    return kvjax.prefill(given, prompts, config=CONFIG, method=method, max_new_tokens=24, pad_multiple=16, chunk_size=16)


@functools.cache
def on_one_device(name):
    return kvjax.generate(params(), read(params(), example(name)), max_new_tokens=STEPS, eos_token_ids=())


def laws(name, mesh):
    """The tokens and the statistics of one device, which every process can read."""
    given = spread(mesh)
    cache = read(given, example(name))
    assert len(cache.logits.addressable_shards) == 2 and not cache.logits.is_fully_addressable
    there, here = kvjax.generate(given, cache, max_new_tokens=STEPS, eos_token_ids=()), on_one_device(name)
    np.testing.assert_array_equal(there.tokens, here.tokens)
    np.testing.assert_allclose(there.stats.kv_bytes, here.stats.kv_bytes, rtol=1e-6)
    assert str(there.stats.summary()).split(" MB read")[0] == str(here.stats.summary()).split(" MB read")[0]
    assert "4 rows" in repr(there)


def check_calls():
    """`extend`, `decode_step`, `generate` with an EOS and limits, samples, `fork`, `stream`, `sweep`, in turns."""

    def turns(given):
        cache = kvjax.extend(given, read(given, example("quest")), QUESTIONS)
        cache = kvjax.decode_step(given, cache, [1, 2, 3, 4], active=[True, False, True, True])
        copy, other = kvjax.fork(cache, 2), kvjax.fork(cache)
        mesh = None if cache.plan is None else cache.plan.mesh
        logits = np.asarray(readable(mesh, cache.logits))
        out = kvjax.generate(given, cache, max_new_tokens=6, eos_token_ids=(3, 12), limits=[6, 2, 6, 0])
        drawn = kvjax.generate(given, other, max_new_tokens=4, temperature=1.0, key=jax.random.key(3), eos_token_ids=())
        pieces = list(kvjax.stream(given, copy, max_new_tokens=6, eos_token_ids=(12,), block=4))
        read_bytes = measure(out.cache).bytes_read
        more = kvjax.extend(given, kvjax.decode_step(given, drawn.cache, drawn.tokens[:, 0]), drawn.tokens)  # as they came
        found = out.tokens, out.num_tokens, drawn.tokens, read_bytes, readable(mesh, more.logits)
        return pieces, [logits, *map(np.asarray, found)]

    for kind in (AxisType.Explicit, AxisType.Auto):
        here, there = turns(params()), turns(spread("data=2 model=2", kind))
        assert here[0] == there[0]
        assert_same(here[1], there[1])
    settings = [kvjax.methods.SnapKV(budget=b, capacity=16, obs_window=4) for b in (8, 16)]
    options = {"config": CONFIG, "max_new_tokens": 4, "eos_token_ids": ()}
    here, there = (kvjax.sweep(p, [[1, 2, 3], [4] * 9], settings, **options) for p in (params(), spread("data=2 model=2")))
    for one, two in zip(here, there, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)


def check_offloaded():
    """Rows in host memory belong to the devices of their process, also after a cache is saved and loaded."""
    method, given = example("quest", offload=True), spread("data=2 model=2")
    cache = read(given, method)
    kvjax.save_cache(DIRECTORY / "offloaded", cache)
    want = on_one_device("quest").tokens
    for made in (cache, kvjax.load_cache(DIRECTORY / "offloaded", config=CONFIG, method=method, params=given)):
        out = kvjax.generate(given, made, max_new_tokens=STEPS, eos_token_ids=())
        assert out.stats.host_bytes > 0
        np.testing.assert_array_equal(out.tokens, want)


def check_saved():
    """A cache that one process saved, and one that both save: loaded by both, on other meshes."""
    given = spread("data=2 model=2")
    want = np.asarray(on_one_device("quest").tokens)
    kvjax.save_cache(DIRECTORY / SAVED_BY_TWO, read(given, example("quest")))
    with refused("a cache is saved to a new directory"):
        kvjax.save_cache(DIRECTORY / SAVED_BY_TWO, read(given, example("quest")))
    for name in (SAVED_BY_ONE, SAVED_BY_TWO):
        for mesh in ("data=2 model=2", "slots=2 model=2"):
            loaded = kvjax.load_cache(DIRECTORY / name, config=CONFIG, method=example("quest"), params=spread(mesh))
            out = kvjax.generate(spread(mesh), loaded, max_new_tokens=STEPS, eos_token_ids=())
            np.testing.assert_array_equal(out.tokens, want)


def check_refusals():
    """What one process alone cannot do is refused in a sentence."""
    here = jax.process_index()
    with refused("needs a mesh with devices of all 2 processes of this run, got a cache on the devices of process"):
        kvjax.save_cache(DIRECTORY / "alone", read(params(), Full()))
    with refused("all processes must pass identical tokens and lengths; process 1 differs from process 0"):
        kvjax.prefill(spread("slots=4"), [[1, 2, here]], config=CONFIG, max_new_tokens=4)
    whole = spread("slots=4")["embed"]["embedding"].sharding.mesh
    assert least(whole, (5 + here) << 30) == 5 << 30 and least(whole, None if here else 1 << 30) is None
    first = Mesh(np.array([device for device in jax.devices() if device.process_index == 0]), ("model",))
    if here == 1:
        with refused("none of the devices of process 1 of 2 is on the mesh"):
            models.from_pretrained(DIRECTORY / "model", mesh=first)
        where = NamedSharding(first, PartitionSpec("model"))
        nothing = {"a": jax.make_array_from_callback((8,), where, lambda index: None, dtype=np.float32)}
        with refused("process 1 of 2 holds no row, because none of its devices is on the mesh model=2"):
            kvjax.prefill(nothing, [[1, 2]], config=CONFIG, max_new_tokens=4)


def main(number, names):
    assert jax.device_count() == 4 and jax.local_device_count() == 2
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_disable_most_optimizations", True)
    if number == 0:
        models.save_pretrained(DIRECTORY / "model", params(), CONFIG)
    multihost_utils.sync_global_devices("saved")
    for name in names:
        print(name, flush=True)
        laws(*name.split(" on ")) if " on " in name else globals()[name]()


if __name__ == "__main__":
    with one_of_two(int(sys.argv[1]), int(sys.argv[2])):
        main(int(sys.argv[1]), sys.argv[4:])
