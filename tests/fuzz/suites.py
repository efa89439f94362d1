"""Files of the suites (RULER, LongBench, InfiniteBench, SCBench) with a bad value: refused with file and line, or fair.

Fair: whatever was read, an empty answer scores 0, and the references as an answer score more.
"""

from __future__ import annotations

import decimal
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from experiments.benchmarks import Example, read, score
from tests.fuzz.values import nested, texts, visible_texts
from tests.fuzz.verdicts import judge

_CHOICE = {"options": ["Ann", "Bob", "Cat", "Dan"], "answer": ["Cat"]}
_LONGBENCH = {"input": "i", "context": "c", "length": 3, "answers": ["Ann", "Bob"], "all_classes": ["Ann", "Bob"]}
_TURN = {"input": "The smallest number is", "answer": "71432"}
# A format, a file's name, and a right line of it.
_LINES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *(("longbench", name, _LONGBENCH) for name in ("hotpotqa", "gov_report", "trec", "lcc", "multifieldqa_zh", "triviaqa_e")),
    ("longbench", "passage_count", {**_LONGBENCH, "answers": ["7"]}),
    ("longbench", "passage_retrieval_en", {**_LONGBENCH, "answers": ["Paragraph 7"]}),
    ("longbench2", "data", {
        **{f"choice_{x}": x for x in "ABCD"}, "question": "q", "context": "c", "answer": "B", "difficulty": "hard",
        "length": "long", "domain": "Code",
    }),
    ("infinitebench", "passkey", {"input": "What?", "context": "c", "answer": ["71432"]}),
    ("infinitebench", "kv_retrieval", {"input": "Key: a", "context": "c", "answer": ["b-2"]}),
    ("infinitebench", "longbook_choice_eng", {"input": "Who?", "context": "c", **_CHOICE}),
    ("infinitebench", "code_debug", {"input": "Which?", "context": "c", **_CHOICE}),
    ("infinitebench", "longbook_qa_eng", {"input": "Who?", "context": "c", "answer": ["Ann", "Bob"]}),
    ("infinitebench", "longdialogue_qa_eng", {"input": "", "context": "c", "answer": ["ANN", "O'BRIEN"]}),
    ("infinitebench", "math_find", {"input": "The smallest number of the list is: ", "context": "c", "answer": 7}),
    ("infinitebench", "math_calc", {"input": "", "context": "1 + 3", "answer": [[1, 4]]}),
    ("infinitebench", "code_run", {"input": "the value of func_5(-3).", "context": "c", "answer": [-2]}),
    ("scbench", "scbench_kv", {"id": 1, "context": "c", "multi_turns": [_TURN, _TURN]}),
    ("scbench", "scbench_mf", {"id": 1, "context": "c", "multi_turns": [_TURN]}),
    ("scbench", "scbench_vt", {"id": 1, "context": "c", "multi_turns": [{**_TURN, "answer": ["AAA", "BBB"]}]}),
    ("scbench", "scbench_choice_eng", {"id": 1, "context": "c", "multi_turns": [{**_TURN, **_CHOICE}]}),
    ("ruler", "vt", {
        "input": "c\nQuestion: Find all variables that are assigned the value 1.", "answer_prefix": "", "outputs": ["A", "B"],
    }),
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 71432.0, 1e300, float("nan"), float("inf"), 2**70, "", " ", "nan", "\u200b", "\ud800", [], [""],
    [[]], ["a", None], [[1]], {}, {"a": 1}, "B", ["B"], "71432", ["the"], [" Ann\n"], "E", ["Paragraph"], [1, 2],
    "\t", nested(30), ["1e5"], ["-7"], "+3", ["A", "B", "C", "D", "E"],
)  # fmt: skip
# The suites leave out articles, marks and lines of comments; values of Math.Calc are read without their signs.
_MAY_BE_0 = (
    "longbench_f1", "longbench_f1_line", "longbench_f1_zh", "longbench_code", "infinitebench_f1", "infinitebench_f1_zh",
    "longbench_rouge", "longbench_rouge_line", "longbench_rouge_zh", "infinitebench_summary", "infinitebench_math_calc",
)  # fmt: skip


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Write a suite's file, most often with a bad value, and read it."""
    draw = data.draw
    form, name, right = draw(st.sampled_from(_LINES))
    lines = [json.loads(json.dumps(right)) for _ in range(draw(st.integers(1, 3)))]
    about, spoilt = f"{name}.jsonl of {form}", draw(st.integers(0, 4)) > 0
    if spoilt:
        record = draw(st.sampled_from(lines))
        if form == "scbench" and draw(st.integers(0, 2)):
            record = draw(st.sampled_from(record["multi_turns"]))
        key = draw(st.sampled_from(list(record)))
        if draw(st.integers(0, 6)) == 6:
            record.pop(key)
            about += f" without {key}"
        else:
            record[key] = draw(st.sampled_from(_VALUES) | texts() | visible_texts())
            about += f" with {key}={record[key]!r:.80}"
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")

    def fair(examples: list[Example]) -> str | None:
        return next(filter(None, map(_unfair, examples)), None if examples else "no example was read")

    judge(about, lambda: read(f"{form}:{file}"), right=fair, named=(str(file),) if spoilt else ())
    yield


def _unfair(example: Example) -> str | None:
    texts = (example.task, example.context, example.question, example.answer_prefix, *example.answers, *example.classes)
    if not all(isinstance(text, str) for text in texts) or not example.answers or not all(map(str.strip, example.answers)):
        return f"read {example}"
    if (got := score(example, "")) != 0:
        return f"an empty answer scores {got} with the references {example.answers} under {example.scorer}"
    if example.scorer in _MAY_BE_0:
        return None
    if not score(example, _answer(example)) > 0:
        return f"{_answer(example)!r} scores 0 with the references {example.answers} under {example.scorer}"
    return None


def _answer(example: Example) -> str:
    """Write a right answer in the form that the scorer reads."""
    if example.scorer == "longbench2_choice":
        return f"The correct answer is ({example.answers[0]})"
    if example.scorer == "infinitebench_code_debug":
        return f"{example.answers[1]}."
    if example.scorer == "infinitebench_code_run":
        return example.answers[0]
    if example.scorer == "infinitebench_math_find":
        return format(decimal.Decimal(example.answers[0]), "f")
    if example.scorer == "infinitebench_choice":
        return example.answers[-1]
    return " ".join(example.answers)
