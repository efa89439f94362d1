"""The papers' tables made again: what is compared, on rows whose answer is known, and that every row of ours can be made."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
import pytest

import models
from experiments.cli import read_yaml
from experiments.evaluation import Entry, Remade, remade, remade_tables, verdicts
from experiments.evaluation.printed import PrintedPart, PrintedRow, PrintedTable, printed_tables
from experiments.evaluation.settings import EvaluationSettings
from experiments.lab.site import pages, paper_tables
from experiments.tasks import expand

DOCS = pathlib.Path(models.__file__).parents[1] / "docs"
SAMPLES = 40


def entry(method, task, right, length=8192):
    """A row with ``right`` right answers."""
    scores = {str(index): float(index < right) for index in range(SAMPLES)}
    row = {"method": method, "name": task, "task": task, "length": length, "value": 100 * right / SAMPLES, "unit": "percent"}
    return Entry(pathlib.Path(), row, scores, {}, dict.fromkeys(scores, ""))


def table(rows, samples=None, tasks=("a", "b", "c")):
    scores = {label: dict(zip(tasks, values, strict=True)) for label, values in rows.items()}
    made = {label: PrintedRow(label, {}, "", by_task, None, {}) for label, by_task in scores.items()}
    return PrintedTable("Paper", "Suite", "table 1", "model", (), None, samples, tasks, made)


# c is a task that we do not have; x is better than y there alone.
ROWS = {"full": (80, 80, 0), "x": (10, 30, 100), "y 1 %": (60, 60, 0), "z": (90, 90, 0), "w": (5, 5, 5)}
OURS = [
    *(entry("full", task, 36) for task in "ab"),
    *(entry("x", task, 20) for task in "ab"),
    *(entry("y(budget=1)", task, 10) for task in "ab"),
    *(entry("z", task, 0) for task in "ab"),
    entry("w", "a", 40),
    *(entry("x", task, 40, length=512) for task in "ab"),  # of another length
]


def remake(printed, tasks=None, rows=None):
    rows = rows or {"x": "x", "y 1 %": "y(budget=1)", "z": "z", "w": "w"}
    return Remade("title", "about", (printed,), "main", (8192,), (8192,), tasks, {"ours": rows}, {})


def test_signs_and_order_come_from_shared_tasks():
    (verdict,) = verdicts(remake(table(ROWS)), OURS)
    assert verdict.cells == 2 and verdict.full == 90.0
    by_label = {system.label: system for system in verdict.systems}
    assert [(x.label, x.printed, x.score, x.done) for x in verdict.systems] == [
        ("x", 20.0, 50.0, 2), ("y 1 %", 60.0, 25.0, 2), ("z", 90.0, 0.0, 2), ("w", 5.0, None, 1),
    ]  # fmt: skip
    assert by_label["x"].printed_loss.mean == -60 and by_label["x"].loss.mean == pytest.approx(-40)
    assert {label: system.sign for label, system in by_label.items()} == {
        "x": "same", "y 1 %": "same", "z": "opposite", "w": "",
    }  # fmt: skip
    assert [system.label for system in verdict.compared] == ["x", "y 1 %", "z"]
    assert verdict.tau == -1.0  # theirs: z, y, x; ours: x, y, z
    found = {(change.better, change.worse): change for change in verdict.changes}
    assert found.keys() == {("z", "y 1 %"), ("z", "x"), ("y 1 %", "x")}
    assert found["z", "x"].first.mean == 70 and found["z", "x"].second.mean == pytest.approx(-50)
    assert all(change.beyond_noise for change in verdict.changes)


def test_a_difference_within_noise_has_no_sign_and_changes_nothing_beyond_it():
    ours = [*(entry(method, task, 20) for method in ("full", "x") for task in "ab"), entry("z", "a", 21), entry("z", "b", 20)]
    (verdict,) = verdicts(remake(table({**ROWS, "x": (95, 95, 0)}), rows={"x": "x", "z": "z"}), ours)
    assert [system.sign for system in verdict.systems] == ["within noise", "within noise"]
    (change,) = verdict.changes
    assert (change.better, change.worse) == ("x", "z") and not change.beyond_noise


def test_printed_noise_counts_too():
    """As if both rows were answered independently: worked out by hand for one task of 100 samples."""
    part = PrintedPart(table({"full": (50, 0, 0), "x": (60, 0, 0)}, samples=100), ("a",), ())
    assert part.difference("x", "full").mean == 10
    assert part.difference("x", "full").plus_minus == pytest.approx(1.96 * np.sqrt(0.5 * 0.5 + 0.6 * 0.4) * 10)
    assert PrintedPart(part.table, ("a", "b"), ()).difference("x", "full").plus_minus == pytest.approx(
        part.difference("x", "full").plus_minus / 2  # the other task has no variance, and the mean is over two
    )
    few, unknown = (verdicts(remake(table(ROWS, samples)), OURS)[0].systems for samples in (1, None))
    assert [system.sign for system in few] == ["within noise"] * 3 + [""]
    assert [system.sign for system in unknown] == ["same", "same", "opposite", ""]


def test_printed_means_stand_beside_tasks_of_ours():
    means = {"full": {1: 50.0, 2: 30.0}, "x": {1: 70.0, 2: 40.0}}  # at two lengths
    rows = {label: PrintedRow(label, {}, "", {}, None, at) for label, at in means.items()}
    printed = dataclasses.replace(table({}), rows=rows)
    made = dataclasses.replace(remake(printed, (("", "a"),), {"x": "x"}), printed_lengths=(1, 2))
    (verdict,) = verdicts(made, OURS)
    (system,) = verdict.systems
    assert (system.printed, system.printed_loss.mean, system.score, system.sign) == (55.0, 15.0, 50.0, "opposite")
    assert verdicts(dataclasses.replace(made, tasks=(("", "nothing"),)), OURS) == []
    mapped = verdicts(remake(table(ROWS), (("c", "a"),), {"x": "x"}), OURS)[0].systems[0]
    assert (mapped.printed, mapped.score) == (100.0, 50.0)  # our a stands for the printed c


def test_a_row_that_is_not_printed_is_refused():
    entry = {"title": "t", "about": "", "paper": "CHESS", "suite": "LongBench v2", "record": "main", "lengths": [8192]}
    with pytest.raises(ValueError, match="t: expected a printed row, one of full, h2o 20 %.*, got 'quest 2049'"):
        remade._remade({**entry, "own": ["quest 2049"]})


# ---- the tables that ship -----------------------------------------------------------------------------------------------


def settings_of(name):
    return EvaluationSettings.from_mapping(read_yaml(DOCS / "settings" / f"{name}.yaml"), name)


@pytest.mark.parametrize(
    ("record", "own", "others", "drawn"),
    [
        ("main", ("main",), paper_tables.SETTINGS, ("smollm2-retrieval", 200)),
        ("main-32k", (), ("main-32k",), ("smollm2-retrieval", 200)),
        ("qwen-16k", ("qwen-16k",), ("qwen-papers", "qwen-papers-niah"), ("qwen2.5-coder-1.5b", 100)),
        ("qwen-32k", ("qwen-papers", "qwen-32k"), (), ("qwen2.5-coder-1.5b", None)),  # the first with 50 samples, by flags
    ],
)
def test_the_settings_make_every_row(record, own, others, drawn):
    """Every cell that a table compares is one of the main settings or of a paper's; a paper's settings make no other row."""
    made, labels = {}, set()
    for name in (*own, *others):
        settings = settings_of(name)
        assert settings.model == drawn[0] and drawn[1] in (settings.samples, None)
        for choice in settings.choices:
            made.setdefault(choice.label, set()).update(expand(settings.generated))
        labels |= {choice.label for choice in settings.choices if name in others}
    used, asked = {"full"}, set(expand(settings_of((*own, *others)[0]).generated))
    for again in (x for x in remade_tables() if x.record == record):
        assert again.lengths == settings.lengths
        tasks = {ours for _, ours in again.tasks or ()}
        for printed in again.tables:
            wanted = tasks or set(printed.tasks) & asked
            for label in (label for rows in again.settings.values() for label in rows.values()):
                assert wanted <= made[label], (again.title, label)
                used.add(label)
    assert labels <= used


def test_every_printed_table_is_made_again_or_said_to_be_left():
    """TokenSelect's LongBench has two systems at most that fit into the window of ours."""
    made = {(x.paper, x.suite, x.model) for again in remade_tables() for x in again.tables}
    every = {(x.paper, x.suite, x.model) for x in printed_tables()}
    assert {key[:2] for key in every - made} == {("TokenSelect", "LongBench")}
    assert len({again.title for again in remade_tables()}) == len(remade_tables())


def test_rows_of_an_ablation_equal_its_record():
    record = json.loads((DOCS / "records" / "ablations" / "extrapolate.json").read_text())
    beyond = next(x for x in remade_tables() if x.title == "TokenSelect, RULER beyond the window")
    found = verdicts(beyond, paper_tables._entries(DOCS, "extrapolate"))
    (system,) = [x for x in found[0].systems if x.label == "tokenselect"]
    values = [
        row["value"] for row in record["metrics"]
        if row["setting"]["method"] == "tokenselect" and row["length"] in beyond.lengths
    ]  # fmt: skip
    assert system.done == len(values) == 6 and system.score == pytest.approx(np.mean(values))


def test_the_page_says_what_has_not_run(tmp_path):
    """Without the main record too: the tables of the ablation remain, and the part of a page names the commands."""
    folder = tmp_path / "docs"
    (folder / "records" / "ablations").mkdir(parents=True)
    for name in ("main-32k", "qwen-16k", "qwen-32k", "qwen-papers", "qwen-papers-niah", *paper_tables.SETTINGS):
        (folder / "settings").mkdir(exist_ok=True)
        (folder / "settings" / f"{name}.yaml").write_text((DOCS / "settings" / f"{name}.yaml").read_text())
    assert "papers-chess.yaml --out docs/records/results/main`" in pages.parts(folder)["papers-remade"]()
    record = json.loads((DOCS / "records" / "ablations" / "extrapolate.json").read_text())
    record["metrics"] = [row for row in record["metrics"] if row["setting"]["method"] != "streamingllm"]
    (folder / "records" / "ablations" / "extrapolate.json").write_text(json.dumps(record))
    text = paper_tables.page(folder)
    assert text.count("This part has not been measured yet. `python -m kvjax eval") == sum(
        again.record != "extrapolate" for again in remade_tables()
    )
    assert "| [CHESS, LongBench v2](#chess-longbench-v2) | at the paper's shares | 0 of 7 |" in text
    (line,) = [x for x in text.splitlines() if x.startswith("| StreamingLLM | 23.4 |")]
    assert line.endswith("| not run |  |")
