"""Damaged files of the suites of long answers: one sentence with the file and the entry, before anything is generated."""

from __future__ import annotations

import json
import re

import pytest

from experiments.benchmarks import read

KV = {"num_kvs": 2, "question": "k", "context": "{}", "answer": "v", "demos": [["a", "b"], ["c", "d"]]}
RANK = {"qid": "1", "query": "q", "ctxs": [{"id": "5", "text": "x", "label": 1}, {"id": "6", "text": "y", "label": 0}]}
ROUTE = {"question_repr": ["a", "b"], "context_nl": "c", "answer_nl": "x"}
COUNT = {"nums": [1, 2, 3, 4], "target": 10}
RULES = {"key": 1, "prompt": "p", "instruction_id_list": ["length_constraints:number_words"],
         "kwargs": [{"relation": "at least", "num_words": 5}]}  # fmt: skip
GOOD = [("helmet", "kv.jsonl", KV), ("helmet", "rank.jsonl", RANK), ("ifeval", "input.jsonl", RULES),
        ("longproc", "path_traversal_2k.json", ROUTE), ("longproc", "countdown_2k.json", COUNT)]  # fmt: skip


def spec(folder, form, name, record, prompts='USER_PROMPT: "A prompt.\\n\\nQ"'):
    (folder / "prompts.yaml").write_text(prompts)
    (folder / name).write_text(json.dumps([record] if form == "longproc" else record))
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
        ("ifeval", "i.jsonl", RULES | {"kwargs": ["five"]}, "an object with the arguments of length_cons"),
        ("ifeval", "i.jsonl", RULES | {"instruction_id_list": [{}]}, "expected an instruction of IFEval"),
        ("ifeval", "i.jsonl", RULES | {"kwargs": [{"relation": "at least", "num_words": "5"}]}, "arguments that length_cons"),
        ("longproc", "path_traversal_2k.json", ROUTE | {"question_repr": ["a"]}, "a list of two cities in the field"),
        ("longproc", "countdown_2k.json", COUNT | {"nums": [1, 2, 3]}, "four whole numbers in the field 'nums', got list"),
        ("longproc", "countdown_2k.json", COUNT | {"nums": [1, 2, 3, "4"]}, "four whole numbers in the field 'nums'"),
    ],
)  # fmt: skip
def test_records_of_another_form_are_refused_with_their_place(tmp_path, form, name, record, message):
    where = f"{tmp_path / name}, {'entry' if form == 'longproc' else 'line'} 1: "
    with pytest.raises(ValueError, match=re.escape(where) + ".*" + re.escape(message)):
        read(spec(tmp_path, form, name, record))


@pytest.mark.parametrize(
    "prompts", ["- a list", "USER_PROMPT: [", 'USER_PROMPT: "{nums.y}"', 'USER_PROMPT: "{nums[a]}"', ""]
)
def test_prompts_of_another_form_are_refused_with_their_file(tmp_path, prompts):
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / "prompts.yaml")) + ": expected"):
        read(spec(tmp_path, "longproc", "countdown_2k.json", COUNT, prompts))
