"""Files of NoLiMa, BABILong, Oolong and MRCR: what is read, what is refused, and scores that the suites' programs gave."""

import json

import pytest

from experiments.benchmarks import read, score

ALICE = {"context": "A text.", "question": "Who?", "gold_answers": ["Alice", "Bob"]}
ROOM = {"input": "Mary went to the office.", "question": "Where is Mary? ", "target": "office"}
BEFORE = ROOM | {"question": "Where was the apple before the office? ", "target": "garden", "task": "qa3"}
MANY = ROOM | {"question": "How many objects is Bill carrying? ", "target": "one", "task": "qa7"}
PROMPT = [
    {"role": "user", "content": "Write."},
    {"role": "assistant", "content": "Tale."},
    {"role": "user", "content": "Again."},
]
AGAIN = {"prompt": json.dumps(PROMPT), "answer": "abcHello there", "random_string_to_prepend": "abc", "n_needles": 2}


def log(answer: str, kind: str) -> dict[str, str]:
    return {"context_window_text": "A text.", "question": "Q?", "answer": answer, "answer_type": f"ANSWER_TYPE.{kind}"}


# Suite, record, and by answer the score that the suite's program gave to it (NoLiMa of July 2025, BABILong of June 2026,
# Oolong of November 2025, and MRCR's function in its dataset card).
RECORDED = [
    ("nolima", ALICE, {" Alice ": 1, "ALICE": 0, "Alice.": 0, "It is Alice": 0, "": 0, "Bob": 1}),
    ("nolima", ALICE | {"metric": "contains"}, {"It is Alice.": 1, "alice": 0, "Alice\nYuki": 1}),
    ("nolima", ALICE | {"metric": "lastline_EM"}, {"So\nAlice": 1, "Alice\nYuki": 0, " So\nAlice\n\n": 1}),
    ("nolima", ALICE | {"metric": "lastline_contains"}, {"So\nit is Alice.\n": 1, "Alice\nYuki": 0}),
    ("babilong", ROOM, {"office": 1, "OFFICE.": 1, "the kitchen and the office": 0, "office. kitchen": 1, "in. office": 0}),
    ("babilong", BEFORE, {"garden": 1, "the office, after the garden": 1, "office": 0, "<example> garden": 0}),
    ("babilong", MANY, {"one": 1, "none": 0, "no one": 1, "One or two": 0}),
    ("babilong", MANY | {"target": "apple,milk", "task": "qa8"}, {"milk, apple": 1, "apple": 0, "apple, milk, football": 0}),
    ("babilong", MANY | {"target": "e,n", "task": "qa19"}, {"e,n": 1, "e,e": 0, "e,n,e": 0}),
    ("oolong", log("['spam']", "LABEL"), {"Label: **spam**": 1, "Label: [ham]": 0, "it is spam": 0}),
    ("oolong", log("[12]", "NUMERIC"), {"Answer: 12": 1, "Answer: 14": 0.5625, "Answer: 1e3": 0, "11": 0.75, " 12": 1}),
    ("oolong", log("['more common than']", "COMPARISON"), {
        "Answer: ham is more common than spam": 1, "Answer: more common": 1, "Answer: less common than": 0,
    }),
    ("oolong", log("[datetime.date(2023, 1, 5)]", "DATE"), {"Date: Jan 5, 2023": 1, "Date: 2023-01-06": 0, "x": 0}),
    ("mrcr", AGAIN, {"abcHello there": 1, "Hello there": 0, "abcHello": 0.625, " abcHello": 0, "abc": 0}),
]  # fmt: skip


def examples(folder, suite, *records):
    name = {"babilong": "qa1.jsonl"}.get(suite, "file.jsonl")
    (folder / name).write_text("\n".join(map(json.dumps, records)))
    return read(f"{suite}:{folder / name}")


@pytest.mark.parametrize("suite, record, scores", RECORDED)
def test_scores_equal_those_of_the_suites_programs(suite, record, scores, tmp_path):
    (example,) = examples(tmp_path, suite, record)
    assert {answer: score(example, answer) for answer in scores} == pytest.approx(scores)


def test_prompts_hold_the_fields_of_their_suites(tmp_path):
    (one,) = examples(tmp_path, "babilong", ROOM)
    assert one.task == "babilong_qa1" and one.context == ROOM["input"] and "Where is Mary?" in one.question
    (one,) = examples(tmp_path, "mrcr", AGAIN)
    assert one.context == "User: Write.\n\nAssistant: Tale." and one.question == "\n\nAgain." and one.labels == {"needles": 2}
    (one,) = examples(tmp_path, "oolong", log("[12]", "NUMERIC"))
    assert one.context == "A text." and one.question == "\n\nQ?" and one.labels == {"answer": "numeric"}
    folder = tmp_path / "qa3"
    folder.mkdir()
    (folder / "4k.json").write_text(json.dumps([BEFORE]))
    assert [example.task for example in read(f"babilong:{folder}")] == ["babilong_qa3"]


@pytest.mark.parametrize(
    "suite, record, message",
    [
        ("nolima", ALICE | {"metric": "F1"}, "unknown metric of NoLiMa 'F1', did you mean"),
        ("nolima", {"context": "A", "question": "B"}, "expected a field 'gold_answers'"),
        ("babilong", ROOM | {"task": "qa32"}, "unknown task of BABILong 'qa32', did you mean 'qa"),
        ("oolong", log("spam", "LABEL"), "expected a Python list of one answer"),
        ("oolong", log("[datetime.date(2023, 13, 5)]", "DATE"), "expected a Python list of one answer or a date"),
        ("mrcr", AGAIN | {"prompt": "[]"}, "expected at least 2 messages"),
        ("mrcr", AGAIN | {"prompt": "["}, "field 'prompt': expected a JSON list of messages, got what is damaged"),
        ("mrcr", AGAIN | {"prompt": "[" * 100_000}, "field 'prompt': expected a JSON list of messages, got what is damaged"),
        ("mrcr", AGAIN | {"answer": " "}, "field 'answer': expected a reference, got ' '"),
        ("babilong", ROOM | {"target": "roof"}, "field 'target': expected labels of qa1 .*, got 'roof'"),
        ("babilong", ROOM | {"target": ""}, "field 'target': expected a reference, got ''"),
        ("oolong", log("'spam'", "LABEL"), "expected a Python list of one answer"),
        ("mrcr", AGAIN | {"prompt": [{"role": "user"}] * 2}, "message 1: expected a field 'content'"),
    ],
)
def test_a_record_of_another_form_is_refused_with_its_line(suite, record, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        examples(tmp_path, suite, record)
    assert "line 1" in str(caught.value)
