"""Saving and loading a cache: going on from disk equals going on, for every method; failures leave nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import sys

import jax
import numpy as np
import pytest

import kvjax
from kvjax.api import checkpoint
from kvjax.methods import Full, SnapKV
from tests.harness import ALL, NAMES, TINY, any_example, example, group, read, repeated
from tests.kvjax.cases import base, go_on, model

pytestmark = [
    pytest.mark.usefixtures("quick_compile"),
    # Where one array cannot be read, orbax closes its loop while others are being read. Their threads then meet the closed
    # loop, at any later time, and Python reports the coroutines when it collects them.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

pytest.importorskip("orbax.checkpoint")
# A choice for speed: one method for each way to have rows in host memory.
OFFLOADED = "quest", "pariskv", "tokenselect", "chess", "pqcache", "magicpig", "retroinfer"


@pytest.mark.parametrize("name", repeated(ALL, but=("quest", "tova")))
def test_a_loaded_cache_is_the_saved_one(name, tmp_path):
    """It has the same structure, and every array the same type and bits."""
    cache = read(any_example(name), config=model(name))
    kvjax.save_cache(tmp_path / "cache", cache)
    loaded = kvjax.load_cache(tmp_path / "cache", config=model(name), method=any_example(name))
    assert jax.tree.structure(loaded) == jax.tree.structure(cache)
    for saved, back in zip(jax.tree.leaves(cache), jax.tree.leaves(loaded), strict=True):
        assert saved.dtype == back.dtype
        np.testing.assert_array_equal(saved, back)


@pytest.mark.parametrize("name", repeated([x for x in ALL if x.values[0] in NAMES], but=("chess",)))
def test_loading_equals_going_on(name, tmp_path):
    """One method shows it: it chooses slots, and has state that all layers share."""
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


def test_what_does_not_describe_a_cache_is_refused(tmp_path):
    kvjax.save_cache(tmp_path / "cache", read(example("full")))
    (tmp_path / "cache" / "kvjax.json").write_text("{}")
    with pytest.raises(ValueError, match="does not describe a saved cache"):
        kvjax.load_cache(tmp_path / "cache", config=TINY, method="full")


def test_traced_numbers_are_restored(tmp_path):
    """The budget is the saved one, not the budget of the method that is given to `load_cache`."""
    kvjax.save_cache(tmp_path / "cache", read(example("snapkv", capacity=16, budget=9)))
    loaded = kvjax.load_cache(tmp_path / "cache", config=TINY, method=example("snapkv", capacity=16, budget=12))
    assert int(loaded.method.budget) == 9


def test_a_cache_of_another_method_or_model_is_refused(tmp_path):
    kvjax.save_cache(tmp_path / "cache", read(example("snapkv")))
    with pytest.raises(ValueError, match=r"was made by SnapKV\(.*budget=12.*got Full\("):
        kvjax.load_cache(tmp_path / "cache", config=TINY, method="full")
    with pytest.raises(ValueError, match=r"was made by SnapKV\(.*obs_window=5.*got SnapKV\(.*obs_window=6"):
        kvjax.load_cache(tmp_path / "cache", config=TINY, method=SnapKV(budget=12, obs_window=6, kernel=3))
    other = dataclasses.replace(TINY, rope_theta=5.0)
    with pytest.raises(ValueError, match="rope_theta=10000.0.*got .*rope_theta=5.0"):
        kvjax.load_cache(tmp_path / "cache", config=other, method=example("snapkv"))


def test_a_cache_whose_arrays_have_other_names_is_refused(tmp_path, monkeypatch):
    """A new name is how a version says that an array has another meaning."""
    kvjax.save_cache(tmp_path / "cache", read(example("snapkv")))
    about = checkpoint._read_about(tmp_path / "cache")
    about["leaves"][0]["name"] += "_of_old"
    monkeypatch.setattr(checkpoint, "_read_about", lambda source: about)
    with pytest.raises(ValueError, match=r"saved by another version of kvjax, in which SnapKV\(.*keeps other arrays"):
        kvjax.load_cache(tmp_path / "cache", config=TINY, method=example("snapkv"))


def test_values_in_4_bits_with_one_scale_are_refused(tmp_path):
    """An earlier version gave a value one scale, where each of four groups of channels has one now."""
    cache = read("full", kv_dtype="k8v4")
    one = [dataclasses.replace(x, scale=x.scale[..., 0]) if x.grouped else x for x in cache.layers[0].cache.codes]
    old = dataclasses.replace(cache.layers[0], cache=dataclasses.replace(cache.layers[0].cache, codes=tuple(one)))
    kvjax.save_cache(tmp_path / "cache", dataclasses.replace(cache, layers=(old, *cache.layers[1:])))
    with pytest.raises(ValueError, match=r"saved by another version of kvjax, in which Full.*; prefill again"):
        kvjax.load_cache(tmp_path / "cache", config=TINY, method="full")


def test_an_existing_directory_is_not_overwritten(tmp_path):
    (tmp_path / "cache").mkdir()
    with pytest.raises(ValueError, match="new directory, got .*cache, which exists already"):
        kvjax.save_cache(tmp_path / "cache", read("full"))
    assert list(tmp_path.iterdir()) == [tmp_path / "cache"] and not list((tmp_path / "cache").iterdir())


NAMES_OF_FOLDERS = "run[1]", "a\\b", "[!a]", "gs:", "a?*{b}", "%20 #ü\n'\"", "x" * 250, "é" * 120, "\udcff"


@pytest.mark.parametrize("name", NAMES_OF_FOLDERS)
def test_a_cache_loads_from_a_folder_of_any_name(name, tmp_path):
    """Orbax reads brackets as a pattern: it said that it had saved, and what it wrote could not be loaded."""
    cache = read("full")
    (tmp_path / "x[1]").mkdir()
    target = tmp_path / "x[1]" / name
    kvjax.save_cache(target, cache)
    loaded = kvjax.load_cache(target, config=TINY, method="full")
    jax.tree.map(np.testing.assert_array_equal, loaded, cache)
    assert [path.name for path in (tmp_path / "x[1]").iterdir()] == [name]
    assert sorted(path.name for path in target.iterdir()) == ["arrays", "kvjax.json"]


def test_what_cannot_be_read_back_is_not_saved(tmp_path, monkeypatch):
    """The folder's path goes to orbax as it stands, as it once did."""
    monkeypatch.setattr(checkpoint, "plain_path", contextlib.nullcontext)
    with pytest.raises(OSError, match=r"the cache cannot be saved as .*run\[1\], nothing was kept"):
        kvjax.save_cache(tmp_path / "run[1]", read("full"))
    assert not list(tmp_path.iterdir())


def test_a_directory_without_a_cache(tmp_path):
    with pytest.raises(FileNotFoundError, match="no saved cache in .*kvjax.json"):
        kvjax.load_cache(tmp_path, config=TINY, method=Full())


def test_failing_to_write_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_ABOUT", "no such directory/kvjax.json")  # the last thing written
    with pytest.raises(FileNotFoundError, match="no such directory"):
        kvjax.save_cache(tmp_path / "cache", read("full"))
    assert not list(tmp_path.iterdir())
    monkeypatch.undo()
    kvjax.save_cache(tmp_path / "cache", read("full"))
    assert (tmp_path / "cache" / "kvjax.json").is_file()


def test_orbax_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"kvjax\[train\]"):
        kvjax.save_cache(tmp_path / "cache", read("full"))
    assert not list(tmp_path.iterdir())


def test_an_interrupt_while_orbax_is_imported_is_an_interrupt(tmp_path, monkeypatch):
    """A compiled module that is interrupted while it starts raises an ImportError."""

    class Interrupted:
        def find_spec(self, name, path=None, target=None):
            if name == "orbax.checkpoint":
                raise ImportError("initialization failed") from KeyboardInterrupt()

    monkeypatch.delitem(sys.modules, "orbax.checkpoint")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(KeyboardInterrupt):
        kvjax.save_cache(tmp_path / "cache", read("full"))


def test_damage_is_found_and_named(tmp_path, capfd):
    cache = read(example("full"))
    kvjax.save_cache(tmp_path / "cache", cache)
    about = tmp_path / "cache" / "kvjax.json"
    largest = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)

    def refused(file, content, match):
        before = file.read_bytes()
        file.write_bytes(content)
        with pytest.raises(ValueError, match=match) as caught:
            kvjax.load_cache(tmp_path / "cache", config=TINY, method="full")
        assert "\n" not in str(caught.value)
        file.write_bytes(before)

    whole = largest.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 4
    refused(largest, flipped, rf"damaged: arrays/.*{largest.name} is not as it was saved: got the checksum \w{{16}}")
    refused(largest, whole[:-9], rf"{largest.name} should have {len(whole)} bytes, got {len(whole) - 9} bytes")
    edited = about.read_bytes().replace(b'"float32"', b'"int8"', 1)
    refused(about, edited, "kvjax.json is not as save_cache wrote it: .*checksum")
    for broken in (edited[:-5], b"[" * 100_000, b"\xff\xfe", b'{"checksum": "0"}', b"[]"):
        refused(about, broken, "kvjax.json does not describe a saved cache")
    largest.rename(tmp_path / "away")
    with pytest.raises(ValueError, match=f"{largest.name} should have {len(whole)} bytes, got no such file"):
        kvjax.load_cache(tmp_path / "cache", config=TINY, method="full")
    gc.collect()
    assert capfd.readouterr().err == ""  # orbax read no damaged file


def test_damage_is_found_in_folders_without_checksums_of_files(tmp_path):
    kvjax.save_cache(tmp_path / "cache", read(example("full")))
    file = tmp_path / "cache" / "kvjax.json"
    about = {name: value for name, value in json.loads(file.read_text()).items() if name not in ("sums", "checksum")}
    file.write_text(json.dumps(about | {"checksum": checkpoint._checksum_of_json(about)}))
    kvjax.load_cache(tmp_path / "cache", config=TINY, method="full")
    largest = max((path for path in tmp_path.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    flipped = bytearray(largest.read_bytes())
    flipped[len(flipped) // 2] ^= 4
    largest.write_bytes(flipped)
    with pytest.raises(ValueError, match=r"the array \.layers\[\d\].* is damaged: got the checksum \w{16}, expected \w{16}"):
        kvjax.load_cache(tmp_path / "cache", config=TINY, method="full")
    gc.collect()


def test_a_full_disk_leaves_nothing_and_one_error(tmp_path, caplog):
    resource = pytest.importorskip("resource", reason="only Unix limits the size of files")
    cache = read("full")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(OSError, match="no space to save a cache as .*cache; nothing was kept") as caught:
            kvjax.save_cache(tmp_path / "cache", cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__
    assert not list(tmp_path.iterdir()) and not caplog.records
    gc.collect()
