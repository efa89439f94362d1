"""Damaged files of the suites of long answers: one sentence with the file and the entry, before anything is generated."""

from __future__ import annotations

import json
import re

import pytest

from experiments.benchmarks import read

KV = {"num_kvs": 2, "question": "k", "context": "{}", "answer": "v", "demos": [["a", "b"], ["c", "d"]]}
RANK = {"qid": "1", "query": "q", "ctxs": [{"id": "5", "text": "x", "label": 1}, {"id": "6", "text": "y", "label": 0}]}
GOOD = [("helmet", "kv.jsonl", KV), ("helmet", "rank.jsonl", RANK)]


def spec(folder, form, name, record):
    (folder / name).write_text(json.dumps(record))
    return f"{form}:{folder / name}"


@pytest.mark.parametrize("form, name, record", GOOD, ids=[name for _, name, _ in GOOD])
def test_records_in_the_suites_form_are_read_whatever_ends_their_lines(tmp_path, form, name, record):
    place = spec(tmp_path, form, name, record)
    (made,) = read(place)
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes() + b"\r\n\r\n")
    assert read(place) == [made]


@pytest.mark.parametrize(
    "form, name, record, message",
    [
        ("helmet", "kv.jsonl", KV | {"demos": [["a"], ["c", "d"]]}, "a key and a value in the field 'demos', got list"),
        ("helmet", "kv.jsonl", KV | {"demos": [3]}, "pairs of a key and a value in the field 'demos', got int 3"),
        ("helmet", "rank.jsonl", RANK | {"ctxs": [{"id": "5", "text": "x"}]}, "a whole number as 'label', got dict"),
        ("helmet", "rank.jsonl", RANK | {"ctxs": [{"text": "x", "label": 1}]}, "passages with an 'id' and a whole number"),
        ("helmet", "rank.jsonl", RANK | {"ctxs": [{"id": 5, "text": None, "label": 1}]}, "passage with a 'text'"),
    ],
)  # fmt: skip
def test_records_of_another_form_are_refused_with_their_place(tmp_path, form, name, record, message):
    where = f"{tmp_path / name}, line 1: "
    with pytest.raises(ValueError, match=re.escape(where) + ".*" + re.escape(message)):
        read(spec(tmp_path, form, name, record))
