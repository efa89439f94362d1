"""Scores by place in the answer, from recorded answers alone."""

from __future__ import annotations

import json
import shutil

import pytest

from experiments import tasks
from experiments.evaluation import examples
from experiments.evaluation.folder import read_predictions
from experiments.lab import places
from tests.experiments.test_long_tasks import sample

METHODS = {"full": 1.0, "half": 0.5, "late": -0.5}  # the share of its lines that an answer has; negative: the last lines


@pytest.fixture
def folder(tmp_path):
    """A result folder: two samples of two tasks under three methods, and a task without steps."""
    rows, cells = [], {}
    (tmp_path / "predictions").mkdir()
    for task in ("table_1", "ledger_1", "rules_5"):
        made = [sample(task, 1024, seed=seed) for seed in range(2)]
        for method, share in METHODS.items():
            name = f"predictions/{method}--{task}.jsonl"
            lines = []
            for at, one in enumerate(made):
                steps = one.target.split("\n")
                kept = steps[: round(share * len(steps))] if share > 0 else steps[round(share * len(steps)) :]
                text = "\n".join(kept)
                score = tasks.score(task, text, one.answers)
                lines.append({"key": f"{task}{at}", "answers": list(one.answers), "prediction": text, "score": score})
            (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
            cells[name] = [examples.brief(line) for line in lines]
            rows.append({"name": task, "length": 1024, "question": "prefill", "method": method, "predictions": name})
    (tmp_path / examples.FILE).write_bytes(examples.packed(cells))
    about = {"experiment": "eval", "date": "today", "commit": "c", "device": {}, "settings": {"model": "m"}}
    (tmp_path / "metrics.json").write_text(json.dumps({**about, "metrics": rows}))
    return tmp_path


def test_rows_have_their_quarters_and_drift_beside_full(folder):
    assert places.main([str(folder)]) == 0
    rows = json.loads((folder / "places.json").read_text())["metrics"]
    assert [(row["name"], row["method"]) for row in rows[:2]] == [("table_1", "full"), ("table_1", "half")]
    assert {row["name"] for row in rows} == {"table_1", "ledger_1"}
    for row in rows:
        assert sum(row["quarters"]) / 4 == pytest.approx(row["value"], abs=0.02)
    full, half, late = (next(row for row in rows if row["method"] == name) for name in METHODS)
    assert full["quarters"] == [100.0] * 4 and (full["drift"], full["drift_95"]) == (0.0, [0.0, 0.0])
    assert half["quarters"][0] == 100.0 and half["quarters"][3] == 0.0 and half["drift"] == -100.0
    assert late["quarters"][0] == 0.0 and late["quarters"][3] == 100.0 and late["drift_95"] == [100.0, 100.0]
    page = (folder / "places.md").read_text()
    assert "## ledger_1, 1,024 tokens" in page and "| **-100.0 [-100.0, -100.0]** |" in page


def test_predictions_may_lie_in_another_folder_and_must_be_the_answers_of_this_one(folder, tmp_path_factory):
    wanted, other = places.places(folder), tmp_path_factory.mktemp("run")
    shutil.move(folder / "predictions", other / "predictions")
    with pytest.raises(ValueError, match="lacks predictions/full--table_1"):
        places.places(folder)
    assert places.places(folder, [other]) == wanted
    line, *rest = read_predictions(other, {"predictions": "predictions/half--table_1.jsonl"})
    line["prediction"] += "x"
    changed = other / "predictions" / "half--table_1.jsonl"
    changed.write_text("".join(json.dumps(one) + "\n" for one in (line, *rest)))
    with pytest.raises(ValueError, match="holds other answers than"):
        places.places(folder, [other])


def test_without_steps_there_are_no_places(folder):
    record = json.loads((folder / "metrics.json").read_text())
    record["metrics"] = [row for row in record["metrics"] if row["name"] == "rules_5"]
    (folder / "metrics.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="has no task of steps"):
        places.places(folder)
