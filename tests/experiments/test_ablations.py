"""The ablations end to end on a tiny random model."""

from __future__ import annotations

import json
import pathlib

import jax
import pytest

import kvjax
import models
from experiments.ablations.__main__ import main
from experiments.ablations.agreement import measure_agreement, write_text
from experiments.ablations.arms import Lab
from experiments.ablations.plans import ABLATIONS, CHESS_BUDGETS
from experiments.answering import generate, load_model
from experiments.records import Results
from experiments.suites import Cell, Reading, encode_cell
from kvjax import registry
from tests.tiny_models import write_model

pytestmark = pytest.mark.usefixtures("quick_compile")
BUILTIN = pathlib.Path(models.__file__).parent / "builtin"
CONFIG = models.ModelConfig(
    vocab_size=models.load_tokenizer(BUILTIN).get_vocab_size(), hidden_size=32, intermediate_size=48,
    num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=16, max_position_embeddings=2048, qk_norm=True,
    tie_word_embeddings=True, eos_token_ids=(0,),
)  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny random model with the tokenizer that ships."""
    return write_model(tmp_path_factory.mktemp("model"), CONFIG)


@pytest.fixture(scope="module")
def model(directory):
    return load_model(directory)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """Random models never end an answer, and every token that they generate costs time."""
    monkeypatch.setattr(generate, "__kwdefaults__", {**generate.__kwdefaults__, "new_tokens": 8})


def test_agreement_of_full_with_itself(model):
    tokens = encode_cell(Reading(model.tokenizer_file), Cell("passkey", 256, 2, 0)).wholes
    texts = write_text(model, tokens, 256, 24)
    assert [len(text) for text in texts] == [24, 24]
    same = measure_agreement(model, tokens, texts, registry.make("full"), length=256)
    assert same["value"] == 100 and same["new_tokens"] == 24
    texts[0][12] = (texts[0][12] + 1) % 5000
    other = measure_agreement(model, tokens, texts, registry.make("full"), length=256)
    assert 50 < other["value"] < 100


@pytest.fixture
def run_ablation(capsys, directory, tmp_path):
    """`python -m experiments.ablations` at the smallest size: what it prints, and its record."""

    def run(name, *more):
        out = tmp_path / "ablations"
        arguments = [
            name, "--model", directory, "--samples", 1, "--length", 512, "--tasks", "passkey", "--trained-length", 128,
            "--workers", 0, "--calibration-prompts", 1, "--new-tokens", 64, "--out", out, *more,
        ]  # fmt: skip
        assert main(list(map(str, arguments))) == 0
        return capsys.readouterr().out, json.loads((out / f"{name}.json").read_text())

    return run


@pytest.mark.parametrize("name", [name for name in ABLATIONS if name != "chess"])
@pytest.mark.thorough
def test_ablations_run(name, run_ablation):
    said, found = run_ablation(name)
    tables = found["notes"]["tables"]
    arms = [arm for table in tables for arm in table["arms"]]
    assert all(f"## {table['title']}" in said for table in tables)
    assert list(dict.fromkeys(m["arm"] for m in found["metrics"])) == list(dict.fromkeys(arms))
    assert all(f"| {arm} |" in said for arm in arms) and "n = 1; " in said


@pytest.mark.thorough
def test_chess_ablation_runs_resumes_and_calibrates_once(run_ablation, monkeypatch):
    said, found = run_ablation("chess")
    assert len(found["metrics"]) == 9 + 8
    assert [m["name"] for m in found["metrics"][9:]] == ["agreement"] * 8
    shown = {m["arm"]: m["counters"] for m in found["metrics"][9:]}
    assert shown["never, 1 %"]["reconstructions"] == 0 and "pages between" in said

    def refused(*args, **kwargs):
        raise AssertionError("nothing is left to run")

    for module, function in ((kvjax, "calibrate_chess"), (kvjax, "prefill"), (kvjax, "generate")):
        monkeypatch.setattr(module, function, refused)
    _, again = run_ablation("chess")
    assert again["metrics"] == found["metrics"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vote"], "unknown ablation 'vote' (did you mean 'votes'?); ablations: votes, theta"),
        (["votes", "--tasks", "paskey"], "unknown task 'paskey'"),
        (["votes", "--new-tokens", "0"], "new_tokens must be at least 1, got 0"),
    ],
)
def test_ablations_refuse(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_traced_knobs_share_programs(model, tmp_path):
    """Compiling costs more than running: what a table varies under one capacity must not compile again."""
    lab = Lab(model, Results(tmp_path / "r.json", "x", {}), 8192, 20, 0, ("passkey",), 16384, 1, 64)
    programs = {"votes": 4, "theta": 2, "extrapolate": 9, "sentences": 5, "channels": 5, "hashing": 3}
    for name, expected in programs.items():
        arms = [arm for table in ABLATIONS[name](lab) for arm in table.arms]
        keys = {(jax.tree.structure(arm.method), arm.config, arm.length) for arm in arms}
        assert len(keys) == expected, name
    assert all(abs(100 * a * b * c - budget) < 1 for budget, (a, b, c) in CHESS_BUDGETS.items())
