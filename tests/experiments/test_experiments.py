"""The ablations and the drift experiment, end to end on a tiny random model."""

from __future__ import annotations

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import models
from experiments.ablations import __main__ as ablations
from experiments.ablations import agreement
from experiments.ablations.plans import ABLATIONS, CHESS_BUDGETS, Lab
from experiments.answering import cell as answers
from experiments.answering import presets as settings_of
from experiments.answering.prompts import Cell, make_prompts
from experiments.drift import __main__ as drift
from experiments.drift import search as drift_search
from experiments.records import resumable as results
from kvjax import registry
from kvjax.methods.pariskv import hashing
from tests.tiny_models import write_model

pytestmark = pytest.mark.usefixtures("quick_compile")
BUILTIN = pathlib.Path(models.__file__).parent / "builtin"
CONFIG = models.ModelConfig(
    vocab_size=models.load_tokenizer(BUILTIN).get_vocab_size(), hidden_size=32, intermediate_size=48,
    num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=16, max_position_embeddings=2048, qk_norm=True,
    tie_word_embeddings=True, eos_token_ids=(0,),
)  # fmt: skip
# kvjax.calibrate_chess donates a cache that it does not return.


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny random model with the tokenizer that ships."""
    return write_model(tmp_path_factory.mktemp("model"), CONFIG)


@pytest.fixture(scope="module")
def model(directory):
    return answers.load_model(directory)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """Random models never end an answer, and every token of one costs time."""
    monkeypatch.setattr(answers.generate, "__kwdefaults__", {**answers.generate.__kwdefaults__, "new_tokens": 8})


def command(monkeypatch, capsys, module, *arguments) -> str:
    """Runs a module's command line: what it prints."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()
    return capsys.readouterr().out


def test_records_of_other_settings_are_not_continued(tmp_path):
    path = tmp_path / "r.json"
    results.Results(path, "this", {"seed": 0}).add({"name": "a", "value": 1, "unit": "percent"}, {"name": "a"})
    assert results.Results(path, "this", {"seed": 0}).find({"name": "a"})["value"] == 1
    with pytest.raises(ValueError, match="holds cells with seed=0, got 1: choose another --out"):
        results.Results(path, "this", {"seed": 1})
    with pytest.raises(ValueError, match="holds the experiment 'this', expected 'other'"):
        results.Results(path, "other", {})


def test_batches_are_equal_and_bounded():
    assert answers.batch_rows(8192, 131072, 25) == 13
    assert answers.batch_rows(8192, 131072, 8) == 8
    assert answers.batch_rows(10**6, 131072, 3) == 1


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"metrics": []}'])
def test_a_file_that_is_no_record_is_said_to_be_none(tmp_path, text):
    path = tmp_path / "metrics.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="metrics.json is no record"):
        results.Results(path, "eval", {})


@pytest.mark.parametrize("share", ["inf", "1e400", "nan", "-1", "0", "3/2", "x"])
def test_what_is_no_budget(share):
    with pytest.raises(ValueError, match="a budget is a share such as 1/8"):
        settings_of.budget_tokens(share, 512)


def test_interval():
    assert answers.interval([1.0] * 5) == [100, 100]
    low, high = answers.interval([0.0, 1.0] * 50)
    assert 35 < low < 45 and 55 < high < 65


def test_a_note_of_a_budget_goes_with_it():
    for given, note in (({}, "1/8 of the context"), ({"budget": 512}, ""), ({"page_size": 8}, "1/8 of the context")):
        assert settings_of.paper_method("quest", 4096, tokenizer=None, config=CONFIG, given=given).note == note


@pytest.mark.parametrize("length", [512, 1024, 8192, 65536])
@pytest.mark.parametrize("name", settings_of.METHODS)
def test_paper_methods_fit_the_context(name, length):
    tokenizer = models.load_tokenizer(BUILTIN)
    made = settings_of.paper_method(name, length, tokenizer=tokenizer, config=CONFIG)
    method, knobs = made.method, vars(made.method)
    scaled = {"tokenselect": 8192, "pariskv": 4096, "sentencekv": 4096, "chess": 1024}
    if name in scaled:
        assert bool(made.note) == (length < scaled[name])
    if name == "tokenselect":
        assert knobs["num_sink"] + knobs["budget"] + knobs["num_local"] <= length // 2
        if not made.note:
            assert (knobs["budget"], knobs["num_sink"], knobs["num_local"], knobs["chunk"]) == (2048, 128, 512, 512)
    if name in settings_of.BASELINES:
        assert method.budget == length // 8


def test_agreement_of_full_with_itself(model):
    cell = Cell("passkey", 256, 2, 0)
    tokens = make_prompts(model.tokenizer_file, cell).tokens
    texts = agreement.write_text(model, tokens, 256, 24)
    assert [len(text) for text in texts] == [24, 24]
    same = agreement.measure_agreement(model, tokens, texts, registry.make("full"), length=256)
    assert same["value"] == 100 and same["new_tokens"] == 24
    texts[0][12] = (texts[0][12] + 1) % 5000
    other = agreement.measure_agreement(model, tokens, texts, registry.make("full"), length=256)
    assert 50 < other["value"] < 100


@pytest.fixture
def run_ablation(monkeypatch, capsys, directory, tmp_path):
    """`python -m experiments.ablations` at the smallest size: what it prints, and its record."""

    def run(name, *more):
        out = tmp_path / "ablations"
        said = command(
            monkeypatch, capsys, ablations, name, "--model", directory, "--samples", 1, "--length", 512, "--tasks",
            "passkey", "--trained-length", 128, "--workers", 0, "--calibration-prompts", 1, "--new-tokens", 64,
            "--out", out, *more,
        )  # fmt: skip
        return said, json.loads((out / f"{name}.json").read_text())

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


def test_ablations_refuse(run_ablation):
    with pytest.raises(
        ValueError, match=r"unknown ablation 'vote' \(did you mean 'votes'\?\); ablations: votes, theta"
    ):
        run_ablation("vote")
    with pytest.raises(ValueError, match="unknown task 'paskey'"):
        run_ablation("votes", "--tasks", "paskey")
    with pytest.raises(ValueError, match="new_tokens must be at least 1, got 0"):
        run_ablation("votes", "--new-tokens", "0")


def test_traced_knobs_share_programs(model, tmp_path):
    """Compiling costs more than running: what a table varies under one capacity must not compile again."""
    lab = Lab(model, results.Results(tmp_path / "r.json", "x", {}), 8192, 20, 0, ("passkey",), 16384, 1, 64)
    programs = {"votes": 4, "theta": 2, "extrapolate": 9, "sentences": 5, "channels": 5, "hashing": 3}
    for name, expected in programs.items():
        arms = [arm for table in ABLATIONS[name](lab) for arm in table.arms]
        keys = {(jax.tree.structure(arm.method), arm.config, arm.length) for arm in arms}
        assert len(keys) == expected, name
    assert all(abs(100 * a * b * c - budget) < 1 for budget, (a, b, c) in CHESS_BUDGETS.items())


def test_drift_runs(directory, monkeypatch, capsys, tmp_path):
    said = command(
        monkeypatch, capsys, drift, "--model", directory, "--prompt-tokens", 320, "--new-tokens", 64, "--every", 32,
        "--k", 10, "--num-sink", 4, "--num-local", 16, "--out", tmp_path / "drift",
    )  # fmt: skip
    found = json.loads((tmp_path / "drift.json").read_text())
    assert len(found["metrics"]) == 2 * 2 * len(drift.ARMS) * 2
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
    pairs = {(m["name"], m["clusters"], m["shares"], m["generated"]): m["value"] for m in found["metrics"]}
    for (stage, *rest), value in pairs.items():
        assert 0 <= value <= 100 and (stage == "coarse_recall" or value <= pairs["coarse_recall", *rest])
    assert "coarse and final recall" in said


def test_drift_refuses():
    for given, expected in (
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"rho": 0.1, "beta": 0.2}, "beta=0.2 and rho=0.1"),
        ({"prompt_tokens": 100, "every": 50}, "must hold at least k=100 tokens, got -170"),
    ):
        with pytest.raises(ValueError, match=expected):
            drift.Settings(**given)


def test_search_finds_everything_when_all_are_candidates():
    key = jax.random.key(0)
    keys = jax.random.normal(key, (2, 2, 300, 16))
    queries = jax.random.normal(jax.random.fold_in(key, 1), (2, 2, 1, 16))
    sizes = {"k": 20, "num_sink": 4, "num_local": 30}
    stored = jnp.int32(280)
    best = drift_search.exact_best(keys, queries[:, :, 0], stored, **sizes)
    score = np.einsum("lhd,lhtd->lht", queries[:, :, 0], keys)
    score[..., :4] = score[..., 250:] = -np.inf
    assert (np.sort(np.nonzero(np.asarray(best[1, 0]))[0]) == np.sort(np.argsort(-score[1, 0])[:20])).all()
    clusters, codes, asked = drift_search.sign_clusters(keys, queries, rotated=True)
    scale = jnp.float32(hashing.rotation_scale(16))
    arguments = (codes, asked[:, :, 0], scale, best, stored, jnp.int32(0))
    every, final = drift_search.recall(clusters, *arguments, jnp.float32(1), jnp.float32(1), **sizes)
    assert (np.asarray(every) == 1).all() and 0.6 < float(final.mean()) <= 1
    few, _ = drift_search.recall(clusters, *arguments, jnp.float32(0.5), jnp.float32(0.2), **sizes)
    assert 0.2 < float(few.mean()) < 1
    learned = drift_search.learned_clusters(keys, queries, jnp.int32(300))
    few, _ = drift_search.recall(learned, *arguments, jnp.float32(0.5), jnp.float32(0.2), **sizes)
    assert 0.2 < float(few.mean()) <= 1
