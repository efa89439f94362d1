"""The ablations end to end on a tiny random model, and the verdicts on claims."""

from __future__ import annotations

import json

import jax
import numpy as np
import pytest

import kvjax
from experiments.answering import calibration, load_model
from experiments.benchmarks import Cell, Reading, encode_cell
from experiments.lab.ablations import run as runs
from experiments.lab.ablations.__main__ import main
from experiments.lab.ablations.arms import Lab
from experiments.lab.ablations.claims import CLAIMS, FULL, Claim, Comparison
from experiments.lab.ablations.cluster_drift import CLUSTERS
from experiments.lab.ablations.plans import ABLATIONS, CHESS_BUDGETS, READINGS
from experiments.lab.ablations.report import ablation_tables
from experiments.lab.ablations.run import measure_distance, run_ablation, write_text
from experiments.lab.ablations.settings import AblationSettings
from experiments.lab.ablations.verdicts import NO, OPEN, YES, judge
from experiments.lab.fidelity import lead, make_texts
from experiments.records import Results
from kvjax import registry

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def model(directory):
    return load_model(directory)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """Random models never end an answer, and every token that they generate costs time."""
    monkeypatch.setattr(runs, "DECODE_TOKENS", 8)


def make_lab(model, path):
    settings = AblationSettings(
        names=("all",), length=8192, samples=20, tasks=("passkey",), trained_length=8192, calibration_prompts=1, new_tokens=64
    )
    return Lab(settings, model, model, Results(path, "x", {}))


@pytest.mark.slow
def test_distance_of_full_from_itself(model):
    tokens = encode_cell(Reading(model.tokenizer_file), Cell("passkey", 256, 2, 0)).wholes
    written = write_text(model, tokens, 256, 24)
    assert [len(text) for text in written] == [24, 24]
    texts = make_texts(tokens, written, 256, 24)
    full = lead(model, registry.make("full"), texts)[0]
    same = measure_distance(model, texts, registry.make("full"), full)
    other = measure_distance(model, texts, registry.make("streamingllm", budget=32), full)
    assert same["value"] < 1e-6 and same["same_top_percent"] == 100
    assert same["perplexity"] == same["full_perplexity"] == other["full_perplexity"]
    assert other["value"] > 0.01 and other["same_top_percent"] < 100
    assert other["value"] == pytest.approx(np.mean(other["scores"]), rel=1e-3) and len(other["scores"]) == 2


@pytest.fixture
def run(capsys, directory, tmp_path):
    """`python -m experiments.lab.ablations` at the smallest size: what it prints, and its record."""

    def run(name, *more):
        out = tmp_path / "ablations"
        arguments = [
            name, "--model", directory, "--samples", 1, "--length", 512, "--tasks", "passkey", "--trained-length", 256,
            "--calibration-prompts", 1, "--new-tokens", 64, "--texts", 2, "--text-tokens", 8,
            "--solved", 0, "--out", out, *more,
        ]  # fmt: skip
        assert main(list(map(str, arguments))) == 0
        return capsys.readouterr().out, json.loads((out / f"{name}.json").read_text())

    return run


@pytest.mark.parametrize("name", [name for name in ABLATIONS if name != "chess"])
@pytest.mark.thorough
def test_every_ablation_runs_and_tabulates_its_arms(name, run):
    said, found = run(name)
    tables = found["notes"]["tables"]
    arms = [arm for table in tables for arm in table["arms"]]
    assert all(f"## {table['title']}" in said for table in tables)
    assert list(dict.fromkeys(m["arm"] for m in found["metrics"])) == list(dict.fromkeys(arms))
    assert all(f"| {arm} |" in said for arm in arms) and "n = 1" in said
    assert all(len(m["scores"]) == m["samples"] for m in found["metrics"])
    # Every claim about this record is judged, on every instrument that it names.
    for claim in (claim for claim in CLAIMS if claim.record == name and not claim.recorded):
        tasks = all(not comparison.tasks for comparison in claim.comparisons)
        assert (judge(claim, found["metrics"], "percent") is not None) or not tasks, claim.text
        far = name != "extrapolate" and all(comparison.nats is not None for comparison in claim.comparisons)
        assert (judge(claim, found["metrics"], "nats") is not None) == far, claim.text


@pytest.mark.thorough
def test_chess_ablation_runs_resumes_and_calibrates_once(run, monkeypatch):
    said, found = run("chess")
    assert len(found["metrics"]) == (1 + 2 * 8) + 8 + (1 + 2 * 2 * len(READINGS))
    shown = {m["arm"]: m["counters"] for m in found["metrics"] if m["name"] == "written"}
    assert len(shown) == 8 and shown["never, 1 %"]["reconstructions"] == 0 and "pages between" in said

    def refused(*args, **kwargs):
        raise AssertionError("nothing is left to run")

    for module, function in ((calibration, "calibrate_chess"), (kvjax, "prefill"), (kvjax, "generate")):
        monkeypatch.setattr(module, function, refused)
    _, again = run("chess")
    assert again["metrics"] == found["metrics"]


def test_tasks_that_full_does_not_solve_are_left_out(model, tmp_path, monkeypatch):
    """Only Full is measured on them, the table says so, and a distance needs no task."""
    asked = []

    def measure(bench, job):
        asked.append((job.arm.name, job.task))
        value = 100.0 if job.task == "passkey" else 40.0
        unit = "nats" if job.task == "prose" else "percent"
        return {"name": job.task, "length": 512, "value": value, "unit": unit, "scores": [value / 100], "samples": 1,
                "seconds": 0.0, "same_top_percent": 50.0, "attended_tokens": 1, "bytes_read_per_step": 1,
                "full_bytes_read_per_step": 1, "counters": {}}  # fmt: skip

    monkeypatch.setattr(runs._Bench, "measure", measure)
    settings = AblationSettings(names=("chunk",), tasks=("passkey", "vt"), length=512, texts=1, text_tokens=8)
    run_ablation(settings, "chunk", model, model, tmp_path)
    assert asked[:2] == [("full", "passkey"), ("full", "vt")]
    assert {task for arm, task in asked[2:]} == {"passkey", "prose"} and len(asked) == 2 + 2 * 4
    page = ablation_tables([tmp_path / "chunk.json"], tmp_path)
    assert "Left out, because Full does not solve them: vt (40 %)." in page
    assert "|  | passkey | KL prose | top | attended |" in page and "| not resolved | +0.0 [-100.0, +100.0] |" in page


def cell(setting, scores, unit="percent", **more):
    return {"table": "t", "setting": setting, "scores": scores, "unit": unit, "name": "vt", "length": 8, **more}


def test_a_claim_holds_only_beyond_its_interval():
    """A lead beyond its interval holds, one behind it does not, and noise is not resolved; less distance is better."""

    def told(better, worse, unit="percent", **margins):
        claim = Claim("M", "r", "t", "", "", (Comparison({"a": 1}, {"a": 2}, **margins),))
        return judge(claim, [cell({"a": 1}, better, unit), cell({"a": 2}, worse, unit)], unit)

    ones, zeros, mixed = [1.0] * 8, [0.0] * 8, [1.0, 0.0] * 4
    assert told(ones, zeros).holds == YES and told(zeros, ones).holds == NO
    assert told(mixed, mixed[::-1]).holds == OPEN and told(ones, ones).holds == OPEN
    # Eight equal scores say little: in three of eight cases another may occur.
    assert told(ones, ones, points=2.0).holds == OPEN and told(ones, ones, points=38.0).holds == YES
    assert told(zeros, ones, points=2.0).holds == NO
    assert told(zeros, ones, unit="nats").holds == YES and told(ones, zeros, unit="nats").holds == NO
    assert told(ones, zeros, unit="nats", nats=None) is None
    assert told(ones, zeros).differences == ((100.0, 62.5, 100.0),) and told(ones, zeros).pairs == 8


def test_only_rows_that_differ_in_nothing_else_are_compared():
    rows = [cell({"a": 1, "k": 8}, [1.0]), cell({"a": 2, "k": 8}, [0.5]), cell({"a": 2, "k": 9}, [0.0]),
            cell({"a": 2, "k": 8}, [0.0], name="qa"), cell({"method": "full"}, [0.9])]  # fmt: skip

    def leads(better, worse):
        found = judge(Claim("M", "r", "t", "", "", (Comparison(better, worse),)), rows, "percent")
        return found and (found.differences[0][0], found.pairs)

    assert leads({"a": 1}, {"a": 2}) == (50.0, 1)
    assert leads({"a": 1}, FULL) == (pytest.approx(10.0), 1)
    assert leads({"a": 3}, {"a": 2}) is None
    every = (Comparison({"a": 1}, {"a": 2}), Comparison({"a": 2}, {"a": 1}))
    both = judge(Claim("M", "r", "t", "", "", every), rows, "percent")
    assert [mean for mean, _, _ in both.differences] == [50.0, -50.0] and both.holds == OPEN
    many = [cell({"a": value}, [float(value)] * 20) for value in (1, 2)]
    assert judge(Claim("M", "r", "t", "", "", every), many, "percent").holds == NO  # one of two does not hold


def test_claims_name_rows_that_the_plans_have(model, tmp_path):
    """A claim about rows that are never measured would stay without a verdict, and nobody would see it."""
    lab = make_lab(model, tmp_path / "r.json")
    lab.results.note("chess_calibration", None)
    for claim in (claim for claim in CLAIMS if not claim.recorded):
        if claim.record == "drift":
            settings = [{"clusters": name, "shares": "fixed", "when": w} for name in CLUSTERS for w in ("first", "last")]
        elif claim.record == "chess":  # its plan calibrates first
            triggers = [{"trigger": name, "budget": 1} for name in ("and", "every 6 pages")]
            settings = [FULL, *({"budget": budget} for budget in CHESS_BUDGETS), *triggers]
        else:
            tables = {table.title: table for table in ABLATIONS[claim.record](lab)}
            settings = [arm.setting for arm in tables[claim.table].arms]
        for comparison in claim.comparisons:
            for wanted in (comparison.better, comparison.worse):
                assert any(wanted.items() <= setting.items() for setting in settings), (claim.text, wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vote"], "unknown ablation 'vote' (did you mean 'votes'?); ablations: votes, theta"),
        (["votes", "--tasks", "paskey"], "unknown task 'paskey'"),
        (["votes", "--new-tokens", "0"], "new-tokens"),
        (["votes", "--solved", "101"], "solved must lie in [0, 100] percent, got 101"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_length_beyond_the_window_is_refused(directory, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["votes", "--model", str(directory), "--length", "4096", "--out", str(out)]) == 2
    assert "length must be at most 2048 tokens" in capsys.readouterr().err
    assert not out.exists()


def test_traced_knobs_share_programs(model, tmp_path):
    """Compiling costs more than running: what a table varies under one capacity must not compile again."""
    lab = make_lab(model, tmp_path / "r.json")
    programs = {"votes": 4, "theta": 2, "chunk": 5, "extrapolate": 28, "sentences": 12, "channels": 4, "strategy": 4,
                "hashing": 3}  # fmt: skip
    for name, expected in programs.items():
        arms = [arm for table in ABLATIONS[name](lab) for arm in table.arms]
        assert len({(jax.tree.structure(arm.method), arm.length) for arm in arms}) == expected, name
    assert all(abs(100 * a * b * c - budget) < 1 for budget, (a, b, c) in CHESS_BUDGETS.items())
