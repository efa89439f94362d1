"""Methods, and parameters, on a mesh of two processes with two devices each, or four; `test_devices.py` runs it twice.

``python -m tests.mesh.two_processes NUMBER PORT DIRECTORY CHECK ...``: every process also computes by itself, on one of its
devices, what is expected. A check is ``METHOD on MESH`` or the name of a function.
"""

import functools
import pathlib
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

import kvjax
import models
from kvjax.mesh.processes import least, readable
from kvjax.methods import Full
from models.files import adapter
from tests.harness import example
from tests.mesh import eight_devices_models
from tests.mesh.eight_devices import CONFIG, READS_CHUNKS, STEPS, assert_same, generated, params, read, turns
from tests.mesh.processes import mesh_of, one_of_two, refused
from tests.tiny_models import vivid_params

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


@functools.cache
def on_one_device(name):
    return generated(params(), example(name), **READS_CHUNKS)


def laws(name, mesh):
    """The tokens and the statistics of one device, which every process can read."""
    given = spread(mesh)
    cache = read(given, example(name), **READS_CHUNKS)
    assert len(cache.logits.addressable_shards) == 2 and not cache.logits.is_fully_addressable
    there, here = kvjax.generate(given, cache, max_new_tokens=STEPS, eos_token_ids=()), on_one_device(name)
    np.testing.assert_array_equal(there.tokens, here.tokens)
    np.testing.assert_allclose(there.stats.kv_bytes, here.stats.kv_bytes, rtol=1e-6)
    assert str(there.stats.summary()).split(" MB read")[0] == str(here.stats.summary()).split(" MB read")[0]
    assert "4 rows" in repr(there)


def check_calls():
    """`extend`, `decode_step`, `generate` with an EOS and limits, samples, `fork`, `stream`, `sweep`, in turns."""

    def more(given):
        drawn = {"temperature": 1.0, "key": jax.random.key(3)}
        out = generated(given, example("quest"), steps=4, drawn=drawn)
        cache = kvjax.extend(given, kvjax.decode_step(given, out.cache, out.tokens[:, 0]), out.tokens)  # as they came
        return np.asarray(out.tokens), np.asarray(readable(None if cache.plan is None else cache.plan.mesh, cache.logits))

    for kind in (AxisType.Explicit, AxisType.Auto):
        given = spread("data=2 model=2", kind)
        for called in (lambda given: turns(given, example("quest")), more):
            assert_same(called(params()), called(given))
    settings = [kvjax.methods.SnapKV(budget=b, capacity=16, obs_window=4) for b in (8, 16)]
    options = {"config": CONFIG, "max_new_tokens": 4, "eos_token_ids": ()}
    here, there = (kvjax.sweep(p, [[1, 2, 3], [4] * 9], settings, **options) for p in (params(), spread("data=2 model=2")))
    for one, two in zip(here, there, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)


def check_offloaded():
    """Rows in host memory belong to the devices of their process, also after a cache is saved and loaded."""
    method, given = example("quest", offload=True), spread("data=2 model=2")
    cache = read(given, method, **READS_CHUNKS)
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
    kvjax.save_cache(DIRECTORY / SAVED_BY_TWO, read(given, example("quest"), **READS_CHUNKS))
    with refused("a cache is saved to a new directory"):
        kvjax.save_cache(DIRECTORY / SAVED_BY_TWO, read(given, example("quest"), **READS_CHUNKS))
    for name in (SAVED_BY_ONE, SAVED_BY_TWO):
        for mesh in ("data=2 model=2", "slots=2 model=2"):
            loaded = kvjax.load_cache(DIRECTORY / name, config=CONFIG, method=example("quest"), params=spread(mesh))
            out = kvjax.generate(spread(mesh), loaded, max_new_tokens=STEPS, eos_token_ids=())
            np.testing.assert_array_equal(out.tokens, want)


def check_refusals():
    """What one process alone cannot do is refused in a sentence."""
    here = jax.process_index()
    with refused("needs a mesh with devices of all 2 processes of this run, got a cache on the devices of process"):
        kvjax.save_cache(DIRECTORY / "alone", read(params(), Full(), **READS_CHUNKS))
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


def assert_parts(got, expected):
    """This process's parts equal the parts of ``expected``, in every bit."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape and not one.is_fully_addressable and len(one.addressable_shards) == 4
        for shard in one.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(other)[shard.index])


def check_loading():
    """Loading, adapters, saving and random parameters where no process can see all of the eight devices."""
    wide = eight_devices_models.WIDE
    whole = jax.tree.map(np.asarray, vivid_params(wide))
    if jax.process_index() == 0:
        models.save_pretrained(DIRECTORY / "wide", whole, wide)
    multihost_utils.sync_global_devices("saved wide")
    factors = eight_devices_models.factors_of(whole)
    for kind in (AxisType.Auto, AxisType.Explicit):
        for data, model in ((1, 8), (2, 4), (8, 1)):
            mesh = eight_devices_models.on(data, model, kind)
            with eight_devices_models.counted() as reads:
                got, config = models.from_pretrained(DIRECTORY / "wide", mesh=mesh)
            assert_parts(got, whole)
            share = {8: 0.51, 4: 1.0, 1: 1.0}[model]  # of the file; norms are read by both processes
            assert sum(size for _, size in reads) <= share * sum(x.size for x in jax.tree.leaves(whole))
            assert adapter.fingerprint(got) == adapter.fingerprint(whole)
            assert_parts(adapter.merge_adapter(got, factors), adapter.merge_adapter(whole, factors))
            again = DIRECTORY / "wide" / f"{kind.name}{model}"
            models.save_pretrained(again, got, config)
            written, wanted = (load_file(place / "model.safetensors") for place in (again, DIRECTORY / "wide"))
            assert written.keys() == wanted.keys()
            assert all(np.array_equal(written[name], wanted[name]) for name in wanted)
    key = jax.random.key(0)
    assert_parts(models.random_params(wide, key, mesh=mesh), models.random_params(wide, key))


def main(number, names):
    assert jax.device_count() == 2 * jax.local_device_count()
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
