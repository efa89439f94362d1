"""Repositories of a hub on 127.0.0.1: downloaded when they are not in the cache, whole or not used."""

import dataclasses
import errno
import json
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import models
from models.hub import repository
from tests.models.hub_server import SHA, serve
from tests.tiny_models import FAMILIES, write_model

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
from huggingface_hub import constants  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]
NAME = "Acme/Tiny-1B"
OTHERS = {  # what is in repositories and is not needed
    "pytorch_model.bin": b"the same weights",
    "consolidated.safetensors": b"the same weights",
    "onnx/model.onnx": b"the same weights",
    "original/params.json": b"{}",
    "onnx/config.json": b"{}",
    ".gitattributes": b"",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny random model with all that a repository has of it."""
    rows = models.load_tokenizer(models.builtin_directory()).get_vocab_size()
    path = write_model(tmp_path_factory.mktemp("tiny"), dataclasses.replace(FAMILIES["qwen3"], vocab_size=rows))
    (path / "chat_template.jinja").write_text("<{{ messages[0].content }}>")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    (path / "README.md").write_text("---\nlicense: mit\n---\nA toy.\n")
    return path


@pytest.fixture(scope="module")
def server():
    with serve() as hub:
        yield hub


@pytest.fixture
def hub(server, directory, tmp_path, monkeypatch):
    """The hub with the tiny model, and an empty cache."""
    server.repositories = {NAME: {path.name: path.read_bytes() for path in directory.iterdir()} | OTHERS}
    server.refused, server.cut = {}, set()
    server.log.clear()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    reach(server.url, monkeypatch)
    return server


def reach(url, monkeypatch):
    """Lets `huggingface_hub` look for the hub at this address."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def test_a_repository_is_downloaded_once(hub, directory, tmp_path, capfd):
    with pytest.raises(FileNotFoundError, match=f"{NAME} is neither .*`kvjax fetch {NAME}` gets it"):
        models.from_pretrained(NAME, offline=True)
    assert hub.log == []
    params, config = models.from_pretrained(NAME)
    assert config.eos_token_ids == (3, 5, 7, 0)  # the last is known by its text in the tokenizer's file
    needed = {path.name for path in directory.iterdir()}
    assert sorted(hub.downloads()) == sorted(needed), "each once, and no other weights"
    snapshot = tmp_path / "cache" / "models--Acme--Tiny-1B" / "snapshots" / SHA
    first = next(line for line in capfd.readouterr().err.splitlines() if line.startswith("kvjax: "))
    assert f"{NAME} (licence: mit) is not on this machine: downloading " in first and str(tmp_path / "cache") in first
    assert {path.name for path in snapshot.iterdir()} == needed

    hub.log.clear()
    for offline in (False, True):
        assert models.checkpoint_directory(NAME, offline=offline) == snapshot
    for ours, theirs in zip(*map(jax.tree.leaves, (params, models.from_pretrained(directory)[0])), strict=True):
        assert np.array_equal(ours, theirs)
    assert models.ChatTemplate.from_directory(NAME) == models.ChatTemplate.from_directory(directory) is not None
    assert models.load_tokenizer(NAME).encode("one 2").ids == models.load_tokenizer(directory).encode("one 2").ids
    assert hub.log == [], "what is in the cache is not asked for"


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "chat_template.jinja"])
def test_a_cut_download_is_no_model_and_the_next_try_goes_on(hub, file, monkeypatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.cut.add(file)
    with pytest.raises(ConnectionError, match=f"{NAME}.*files that are whole are kept") as caught:
        models.from_pretrained(NAME)
    assert "\n" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="nor whole in the local cache"):
        models.from_pretrained(NAME, offline=True)
    whole = set(hub.downloads()) - {file, "config.json"}
    hub.cut.clear()
    hub.log.clear()
    models.from_pretrained(NAME)
    assert file in hub.downloads() and not whole & set(hub.downloads())


def test_the_shards_of_the_index_are_downloaded(hub, tmp_path):
    """The shards of the index are downloaded; a snapshot that lacks one is none."""
    parts = {f"model-0000{i}-of-00002.safetensors": bytes([i]) * 100 for i in (1, 2)}
    index = json.dumps({"weight_map": dict.fromkeys("ab", "model-00001-of-00002.safetensors") | {"c": list(parts)[1]}})
    files = {name: data for name, data in hub.repositories[NAME].items() if name != "model.safetensors"}
    hub.repositories[NAME] = files | parts | {"model.safetensors.index.json": index.encode()}
    snapshot = models.checkpoint_directory(NAME)
    assert all((snapshot / name).read_bytes() == data for name, data in parts.items())
    (snapshot / list(parts)[0]).unlink()
    assert not repository.is_whole(snapshot)
    with pytest.raises(FileNotFoundError):
        models.checkpoint_directory(NAME, offline=True)


def test_only_the_files_of_a_model_are_wanted():
    both = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", *OTHERS]
    assert repository.wanted_files(both) == ["config.json", "model.safetensors"]
    more = ["additional_chat_templates/tool.jinja", "LICENSE", "LICENCE.txt", "README.md", "tokenizer.json", "sub/README.md"]
    assert repository.wanted_files(more) == more[:-1]


def test_a_cache_of_another_program_without_a_tokenizer(hub):
    """Online the tokenizer is added; offline the weights alone are a model."""
    huggingface_hub.snapshot_download(NAME, allow_patterns=["config.json", "model.safetensors"])
    hub.log.clear()
    assert models.from_pretrained(NAME, offline=True) and hub.log == []
    with pytest.raises(ValueError, match=r"no tokenizer\.json in "):
        models.load_tokenizer(NAME, offline=True)
    models.load_tokenizer(NAME)
    assert "tokenizer.json" in hub.downloads() and "model.safetensors" not in hub.downloads()


def test_names_that_the_hub_refuses_and_an_unreachable_hub_are_named(hub, monkeypatch):
    for name in ("Acme/None", "Acme/two--dashes"):
        with pytest.raises(FileNotFoundError, match=f"no model directory {name}"):
            models.checkpoint_directory(name)
    for code, error in (("GatedRepo", PermissionError), ("", OSError), (None, ConnectionError)):
        hub.refused[NAME] = (403, code)
        if code is None:
            reach("http://127.0.0.1:9", monkeypatch)  # the discard port, which nobody serves
        with pytest.raises(error, match=NAME) as caught:
            models.checkpoint_directory(NAME)
        assert "\n" not in str(caught.value)


def test_paths_are_not_looked_for_at_the_hub(hub, tmp_path):
    for path in (tmp_path / "absent", "./runs/model", "../model", "runs/a/b", "runs/model.gguf", "~/model"):
        for load in (models.from_pretrained, models.checkpoint_directory):
            with pytest.raises(FileNotFoundError, match="no (model directory|GGUF file)"):
                load(path)
    assert hub.log == []


@pytest.mark.parametrize("files", [["pytorch_model.bin", "config.json"], ["tiny.Q4_K_M.gguf"], ["model.safetensors"]])
def test_repositories_without_a_model_are_refused(hub, files):
    hub.repositories[NAME] = dict.fromkeys(files, b"{}")
    with pytest.raises(ValueError, match=rf"{NAME} has no config\.json with model\.safetensors") as caught:
        models.checkpoint_directory(NAME)
    assert hub.downloads() == [] and (".gguf" in str(caught.value)) == (".gguf" in files[0])


def test_offline_by_the_environment(hub, monkeypatch):
    """``huggingface_hub`` reads the variable when it is imported."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="may not be downloaded"):
        models.checkpoint_directory(NAME)
    assert hub.log == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_cache_that_is_full_or_closed(hub, monkeypatch, code):
    def fails(*_, **__):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.snapshot_download", fails)
        with pytest.raises(OSError, match=f"{NAME} cannot be kept in the local cache") as caught:
            models.checkpoint_directory(NAME)
    assert caught.value.errno == code
    assert models.from_pretrained(NAME)


@pytest.mark.slow
def test_fetch_reads_the_users_environment(hub, tmp_path):
    """The command in a process of its own: HF_ENDPOINT and HF_HOME choose hub and cache, HF_HUB_OFFLINE forbids."""

    def fetch(**more):
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), **more}
        command = [sys.executable, "-m", "kvjax", "fetch", NAME]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)

    offline = fetch(HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout, hub.log) == (2, "", [])
    assert offline.stderr.startswith("kvjax: error: ") and offline.stderr.count("\n") == 1
    done = fetch()
    assert done.returncode == 0, done.stderr
    snapshot, size, licence = done.stdout.splitlines()
    assert pathlib.Path(snapshot).is_relative_to(tmp_path / "home") and repository.is_whole(pathlib.Path(snapshot))
    assert (size, licence) == ("size: 2 MB", "licence: mit")
