"""Saving and loading a cache: going on from disk equals going on, for every method; failures leave nothing behind."""

import dataclasses
import tracemalloc
import types

import jax
import numpy as np
import pytest

import kvjax
from kvjax.api import checkpoint
from kvjax.methods import Full, SnapKV
from kvjax.testing.model import TinyModel
from tests.harness import ALL, NAMES, TINY, any_example, example, group, read, repeated
from tests.kvjax.cases import base, go_on, model

pytestmark = pytest.mark.usefixtures("quick_compile")

# A choice for speed: one method for each way to have rows in host memory.
OFFLOADED = "quest", "pariskv", "tokenselect", "chess", "pqcache", "magicpig", "retroinfer"


@pytest.mark.parametrize("name", repeated(ALL, but=("chess", "tova")))
def test_a_loaded_cache_is_the_saved_one(name, tmp_path):
    """It has the same structure, and every array the same type and bits."""
    cache = read(any_example(name), config=model(name))
    kvjax.save_cache(tmp_path / "cache", cache)
    loaded = kvjax.load_cache(tmp_path / "cache", config=model(name), method=any_example(name))
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)
    for saved, back in zip(jax.tree.leaves(cache), jax.tree.leaves(loaded), strict=True):
        assert saved.dtype == back.dtype
        np.testing.assert_array_equal(saved, back)


@pytest.mark.parametrize("name", repeated([x for x in ALL if x.values[0] in NAMES], but=("quest",)))
def test_loading_equals_going_on(name, tmp_path):
    """One method shows it; that state which all layers share is loaded, the test above shows for Chess."""
    kvjax.save_cache(tmp_path / "cache", read(example(name), config=model(name)))
    loaded = kvjax.load_cache(tmp_path / "cache", config=model(name), method=example(name))
    np.testing.assert_array_equal(go_on(loaded).tokens, base(name)[1].tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", repeated([group(x) for x in OFFLOADED], but=("quest",)))
def test_host_memory_is_host_memory_again(name, tmp_path):
    method = example(name, offload=True)
    config = model(name)
    cache = read(method, chunk_size=16, config=config)
    kvjax.save_cache(tmp_path / "cache", cache)
    loaded = kvjax.load_cache(tmp_path / "cache", config=config, method=method)
    for saved, back in zip(jax.tree.leaves(cache), jax.tree.leaves(loaded), strict=True):
        assert saved.sharding.memory_kind == back.sharding.memory_kind
        np.testing.assert_array_equal(saved, back)
    np.testing.assert_array_equal(go_on(loaded).tokens, go_on(cache).tokens)


def test_traced_numbers_are_restored(tmp_path):
    """The budget is the saved one, not the budget of the method that is given to `load_cache`."""
    kvjax.save_cache(tmp_path / "cache", read(example("snapkv", capacity=16, budget=9)))
    loaded = kvjax.load_cache(tmp_path / "cache", config=TINY, method=example("snapkv", capacity=16, budget=12))
    assert int(loaded.method.budget) == 9


@pytest.mark.parametrize("name", ["snapkv", "quest", "stages", "verified"])
def test_the_folder_names_its_method(name, tmp_path):
    """So that nobody writes its knobs twice, one that is None too; a knob that no text can hold must be given."""
    cache = read(any_example(name))
    kvjax.save_cache(tmp_path / "cache", cache)
    assert jax.tree.structure(kvjax.load_cache(tmp_path / "cache", config=TINY)) == jax.tree.structure(cache)
    about = checkpoint._read_about(tmp_path / "cache" / "kvjax.json")
    with pytest.raises(ValueError, match="pass method"):
        checkpoint._named(tmp_path, about["method"].replace("budget=", "budget=float32"))


def test_a_cache_of_another_method_or_model_is_refused(tmp_path):
    kvjax.save_cache(tmp_path / "cache", read(example("snapkv")))
    with pytest.raises(ValueError, match=r"was made by SnapKV\(.*budget=12.*got Full\("):
        kvjax.load_cache(tmp_path / "cache", config=TINY, method="full")
    with pytest.raises(ValueError, match=r"obs_window=5.*unlike: obs_window=6\)"):
        kvjax.load_cache(tmp_path / "cache", config=TINY, method=SnapKV(budget=12, obs_window=6, kernel=3))
    other = dataclasses.replace(TINY, rope_theta=5.0)
    with pytest.raises(ValueError, match=r"rope_theta=10000.0.*unlike: rope_theta=5.0\)"):
        kvjax.load_cache(tmp_path / "cache", config=other, method=example("snapkv"))
    loaded = types.SimpleNamespace(params={}, config=TINY)
    for given in {"config": loaded}, {"config": TINY, "params": loaded}:
        with pytest.raises(ValueError, match=f"take its {[*given][-1]}"):
            kvjax.load_cache(tmp_path / "cache", **given)
    with pytest.raises(ValueError, match="a number for each of the model's 4 KV heads, got 2"):
        kvjax.load_cache(tmp_path / "cache", config=dataclasses.replace(TINY, num_kv_heads=4), method=any_example("headkv"))


def test_a_cache_of_another_version_is_refused(tmp_path, monkeypatch):
    """Its format has another number, or its arrays another name or number of axes: so a version says what it changed."""
    kvjax.save_cache(tmp_path / "cache", read(example("snapkv")))
    about = checkpoint._read_about(tmp_path / "cache" / "kvjax.json")
    (name, shape), read_about = (about["leaves"][0][key] for key in ("name", "shape")), checkpoint._read_about
    old = {key: value for key, value in about.items() if key != "format"}
    for change in (old, *({**about, "leaves": [{**about["leaves"][0], **x}, *about["leaves"][1:]]}
                          for x in ({"name": name + "_of_old"}, {"shape": [*shape, 1]}))):  # fmt: skip
        monkeypatch.setattr(checkpoint, "_read_about", lambda file, change=change: change)
        with pytest.raises(ValueError, match="version of kvjax"):
            kvjax.load_cache(tmp_path / "cache", config=TINY, method=example("snapkv"))
    monkeypatch.setattr(checkpoint, "_read_about", read_about)
    kvjax.load_cache(tmp_path / "cache", config=TINY, method=example("snapkv"))


def test_saving_and_loading_hold_little_beside_the_cache(tmp_path):
    """One array of one layer at a time, of 16."""
    config, folder = TinyModel(num_layers=8, max_position_embeddings=1 << 16), tmp_path / "cache"
    cache = kvjax.prefill(config.random_params(), [[1, 2, 3]], config=config, max_new_tokens=1 << 15)
    held = sum(x.nbytes for x in jax.tree.leaves(cache))
    for run in (lambda: kvjax.save_cache(folder, cache), lambda: kvjax.load_cache(folder, config=config)):
        tracemalloc.start()
        run()
        assert tracemalloc.get_traced_memory()[1] <= held / 4
        tracemalloc.stop()


def test_a_directory_without_a_cache(tmp_path):
    with pytest.raises(FileNotFoundError, match="no saved cache in .*kvjax.json"):
        kvjax.load_cache(tmp_path, config=TINY, method=Full())


def test_a_full_disk_leaves_nothing_and_one_error(tmp_path):
    resource = pytest.importorskip("resource", reason="only Unix limits the size of files")
    cache = read("full")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(OSError, match="no space to save a cache as .*cache; nothing was kept") as caught:
            kvjax.save_cache(tmp_path / "cache", cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert not list(tmp_path.iterdir())
