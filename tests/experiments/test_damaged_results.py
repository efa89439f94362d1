"""Result folders: the small file of their examples; if they are damaged, a comparison ends in a sentence about the file."""

import copy
import json
import random

import pytest

from experiments.evaluation import examples, folder, tables

STRANGE = (None, True, 0, -1, 2.5, 10**30, "", "text", [], [1], [[1]], {}, {"a": 1})


def row(method, **fields):
    return {
        "name": "vt", "value": 50.0, "unit": "percent", "interval_95": [0.0, 100.0], "examples": 2, "by": {}, "counters": {},
        "attended_tokens": 8.0, "length_tokens": 16.0, "bytes_read_per_step": 100.0, "full_bytes_read_per_step": 200.0,
        "resident_bytes_per_row": 300.0, "no_effect": False, "seconds": 1.0, "compile_seconds": 0.0, "method": method,
        "knobs": {}, "question": "prefill", "task": "vt", "length": 16, "samples": 2, "seed": 0, "haystack": None,
        "depth": None, "questions": 1, "source": "", "note": "", "predictions": f"predictions/{method}.jsonl", "run": 0,
        **fields,
    }  # fmt: skip


RECORD = {
    "experiment": "eval", "date": "2026-01-01T00:00:00+00:00", "commit": "0" * 40, "versions": {"jax": "1"},
    "device": {"kind": "cpu"}, "settings": {"model": "tiny", "dtype": "float32"}, "metrics": [row("full"), row("quest")],
    "notes": {"runs": [{"date": "2026-01-01T00:00:00+00:00", "commit": "0" * 40, "cells": 2}]},
}  # fmt: skip
LINES = [{"key": f"k{i}", "group": "", "prediction": "a\u2028b", "score": float(i)} for i in range(2)]


@pytest.fixture
def results(tmp_path):
    """A result folder of two rows."""
    write(tmp_path, RECORD, LINES)
    return tmp_path


def write(path, record, lines):
    (path / "predictions").mkdir(exist_ok=True)
    (path / "metrics.json").write_text(json.dumps(record))
    for method, mine in (("full", LINES), ("quest", lines)):
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in mine)
        (path / "predictions" / f"{method}.jsonl").write_text(text, encoding="utf-8")


def places(value, path=()):
    """The paths to all values inside of a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def changed(value, path, new):
    made = copy.deepcopy(value)
    at = made
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return made


def test_a_whole_folder_is_compared(results):
    """Its answers hold a line separator of Unicode, which does not end a line of the file."""
    assert "| Quest" in tables.report([results])


def test_any_value_anywhere_is_compared_or_refused_by_a_sentence(results):
    whole = {"record": RECORD, "lines": LINES}
    cases = [(name, path, new) for name in whole for path in places(whole[name]) for new in STRANGE]
    refused = 0
    for name, path, new in random.Random(0).sample(cases, 80):
        write(results, **(whole | {name: changed(whole[name], path, new)}))
        try:
            assert isinstance(tables.report([results]), str)
        except ValueError as error:
            assert str(results) in str(error) or "Full" in str(error)
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.json", "[" * 100_000, r"metrics\.json: expected what its experiment writes, got RecursionError"),
        ("metrics.json", json.dumps({**RECORD, "metrics": [{}]}), "KeyError: 'predictions'"),
        ("metrics.json", json.dumps({**RECORD, "versions": {}}), "KeyError: 'jax'"),
        ("metrics.json", json.dumps({**RECORD, "metrics": [row("full", value="x")]}), "expected what its experiment writes"),
        ("predictions/quest.jsonl", '{"key": "k0", "gro', r"quest\.jsonl: Unterminated"),
        ("predictions/quest.jsonl", "", r"has 0 examples of predictions/quest\.jsonl, its row says"),
        ("predictions/quest.jsonl", '{"key": "k0"}', "KeyError: 'prediction'"),
        ("examples.npz", "PK", r"examples\.npz is damaged"),
    ],
    ids=lambda text: text[:20],
)
def test_what_is_damaged_is_named(results, file, text, message):
    (results / file).write_text(text)
    with pytest.raises(ValueError, match=message):
        tables.report([results])


@pytest.mark.parametrize("outside", ["../secret.jsonl", "/secret.jsonl", "predictions/../../secret.jsonl"])
def test_predictions_are_files_of_their_folder(results, outside):
    (results.parent / "secret.jsonl").write_text(json.dumps(LINES[0]))
    edited = {**RECORD, "metrics": [row("full", predictions=outside)]}
    (results / "metrics.json").write_text(json.dumps(edited))
    with pytest.raises(ValueError, match="predictions must be a file of the folder, got "):
        tables.report([results])
    with pytest.raises(ValueError, match="predictions must be a file of the folder, got .* in metrics.json"):
        folder.read_examples(results, edited["metrics"])


def test_kept_examples_of_damaged_bytes(tmp_path):
    whole = examples.packed({"a.jsonl": [examples.brief(line) for line in LINES]})
    rng = random.Random(0)
    for _ in range(50):
        at = rng.randrange(len(whole))
        (tmp_path / examples.FILE).write_bytes(whole[:at] if rng.random() < 0.5 else whole[:at] + b"\xff" + whole[at + 1 :])
        try:
            examples.unpacked(tmp_path / examples.FILE)
        except ValueError as error:
            assert f"{examples.FILE} is damaged" in str(error)


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
    grown = {"predictions": "a.jsonl", "examples": 2}
    assert folder.read_examples(tmp_path, [grown]) == [(grown, kept["a.jsonl"] + again)]
    with pytest.raises(ValueError, match=r"has 2 examples of a\.jsonl, its row says 3"):
        folder.read_examples(tmp_path, [{**grown, "examples": 3}])
