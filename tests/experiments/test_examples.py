"""The examples of a result folder in one small file: what is written comes back, and comparisons do not change."""

from __future__ import annotations

import json

import pytest

from experiments.evaluation import examples, folder


def lines(answers, score=1.0, group=""):
    return [
        {"key": f"k{i}é", "group": group, "prediction": text, "score": score, "answers": ["x"]}
        for i, text in enumerate(answers)
    ]


def test_examples_come_back(tmp_path):
    cells = {
        "b.jsonl": [examples.brief(line) for line in lines(["yes", "no", "yes"], score=1 / 3, group="one")],
        "a.jsonl": [examples.brief(line) for line in lines(["no"], score=0.0)],
    }
    (tmp_path / examples.FILE).write_bytes(examples.packed(cells))
    assert examples.unpacked(tmp_path / examples.FILE) == cells
    first, second, third = (line["answer"] for line in cells["b.jsonl"])
    assert first == third != second
    assert examples.unpacked(tmp_path / "none.npz") == {}


def test_predictions_go_before_what_was_kept(tmp_path):
    """A cell that was run again has new predictions; a cell whose predictions are gone has its kept examples."""
    old, new = lines(["old"]), lines(["new"])
    kept = {name: [examples.brief(line) for line in old] for name in ("a.jsonl", "b.jsonl")}
    (tmp_path / examples.FILE).write_bytes(examples.packed(kept))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in new))
    rows = [{"predictions": "a.jsonl"}, {"predictions": "b.jsonl"}]
    (_, again), (_, before) = folder.read_examples(tmp_path, rows)
    assert again == [examples.brief(line) for line in new]
    assert before == kept["b.jsonl"]
    with pytest.raises(ValueError, match=r"lacks c\.jsonl, which its metrics\.json names"):
        folder.read_examples(tmp_path, [{"predictions": "c.jsonl"}])
