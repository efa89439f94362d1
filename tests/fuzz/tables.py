"""Users' tables of questions and files of suites, whole or not: read as what they are, or refused with the file's name.

tests/experiments/test_benchmarks.py has rows that must be refused.
"""

import csv
import dataclasses
import decimal
import io
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow
import pyarrow.parquet
from hypothesis import strategies as st

from experiments.benchmarks import Example, read, score
from tests.fuzz.values import nested, texts, visible_texts
from tests.fuzz.verdicts import judge

_FORMS = ("csv", "json", "columns", "jsonl", "parquet")  # columns: as pandas writes JSON
_TASKS = {
    "niah_single_1": "ruler_all", "qa_1": "ruler_part", "hotpotqa": "longbench_f1", "lcc": "longbench_code",
    "trec": "longbench_class_line", "passkey": "infinitebench_first_integer", "math_find": "infinitebench_math_find",
    "longdialogue_qa_eng": "infinitebench_dialogue", "my own": "quest_passkey", "日本": "scbench_any",
}  # fmt: skip
_NUMBERS = {
    **dict.fromkeys(("infinitebench_first_integer", "quest_passkey"), ("7", "71432", str(2**53 + 1), str(10**30))),
    "infinitebench_math_find": ("7", "0.5", "0.00001", "7.0", str(2**60 + 1)),
}
# The suites leave out articles, marks and lines of comments; values of Math.Calc are read without their signs.
_MAY_BE_0 = (
    "longbench_f1", "longbench_f1_line", "longbench_f1_zh", "longbench_code", "infinitebench_f1", "infinitebench_f1_zh",
    "longbench_rouge", "longbench_rouge_line", "longbench_rouge_zh", "infinitebench_summary", "infinitebench_math_calc",
)  # fmt: skip
_MARK = b"\xef\xbb\xbf"
_TEXTS = ("context", "question", "answer_prefix")
_Draw = Callable[[st.SearchStrategy], Any]
_Row = dict[str, Any]


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Write one table with kvpress's columns, and read it."""
    draw = data.draw
    form, fault, prefixes = draw(st.sampled_from(_FORMS)), "", []
    rows, want = _right(draw, form)
    written = _written(draw, form, rows)
    if draw(st.integers(0, 2)) == 2:
        fault, written, prefixes = _damaged(draw, form, written, want)
    file = folder / f"rows.{'json' if form == 'columns' else form}"
    file.write_bytes(written)
    about = f"{form} of {len(rows)} rows {f'with {fault}' if fault else repr(rows)[:200]}"

    def right(got: list[Example]) -> str | None:
        if not fault:
            return _differs(got, want)
        last = int(form == "csv")  # nobody can see that the last cell of a csv was cut
        faults = [_differs(got[: len(p) - last], p[: len(p) - last]) for p in prefixes if len(p) == len(got)]
        return faults[0] if faults else f"read {len(got)} examples of {len(want)}"

    judge(about, lambda: read(f"kvpress:{file}"), right=right, named=(str(file),) if fault else ())
    yield


# ---- files of the suites ------------------------------------------------------------------------------------------


def check_suites(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Write a suite's file, most often with a bad value, and read it: it is refused with its name, or fair."""
    draw = data.draw
    form, name, right = draw(st.sampled_from(_LINES))
    lines = [json.loads(json.dumps(right)) for _ in range(draw(st.integers(1, 3)))]
    about, spoilt = f"{name}.jsonl of {form}", draw(st.integers(0, 4)) > 0
    if spoilt:
        record = draw(st.sampled_from(lines))
        if form == "scbench" and draw(st.integers(0, 2)):
            record = draw(st.sampled_from(record["multi_turns"]))
        key = draw(st.sampled_from(list(record)))
        record[key] = draw(st.sampled_from(_VALUES) | texts() | visible_texts())
        about += f" with {key}={record[key]!r:.80}"
    file = folder / f"{name}.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")

    def fair(examples: list[Example]) -> str | None:
        return next(filter(None, map(_unfair, examples)), None if examples else "no example was read")

    judge(about, lambda: read(f"{form}:{file}"), right=fair, named=(str(file),) if spoilt else ())
    yield


def _unfair(example: Example) -> str | None:
    """Say what is unfair: an empty answer must score 0, and the references as an answer more."""
    texts = (example.task, example.context, example.question, example.answer_prefix, *example.answers, *example.classes)
    if not all(isinstance(text, str) for text in texts) or not example.answers or not all(map(str.strip, example.answers)):
        return f"read {example}"
    answer = _ANSWERS.get(example.scorer, lambda answers: "\n".join(answers))(example.answers)
    for text, right in (("", lambda got: got == 0), (answer, lambda got: got > 0 or example.scorer in _MAY_BE_0)):
        if not right(got := score(example, text)):
            return f"{text!r} scores {got} with the references {example.answers} under {example.scorer}"
    return None


_SUITES = json.loads((pathlib.Path(__file__).parents[1] / "experiments" / "suites.json").read_text(encoding="utf-8"))
_LONGBENCH = {"input": "i", "context": "c", "length": 3, "answers": ["Ann", "Bob"], "all_classes": ["Ann", "Bob"]}
_TURN = {"input": "The smallest number is", "answer": "71432"}
_TURNS = {
    "scbench_kv": (_TURN, _TURN), "scbench_mf": (_TURN,), "scbench_vt": ({**_TURN, "answer": ["AAA", "BBB"]},),
    "scbench_choice_eng": ({**_TURN, "options": ["Ann", "Bob", "Cat", "Dan"], "answer": ["Cat"]},),
}  # fmt: skip
# A format, a file's name, and a right line of it.
_LINES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    *(("longbench", name, _LONGBENCH) for name in ("hotpotqa", "gov_report", "trec", "lcc", "multifieldqa_zh", "triviaqa_e")),
    ("longbench", "passage_count", {**_LONGBENCH, "answers": ["7"]}),
    ("longbench", "passage_retrieval_en", {**_LONGBENCH, "answers": ["Paragraph 7"]}),
    ("longbench2", "data", _SUITES["longbench2"]["record"]),
    *(("infinitebench", name, {"context": "c", **x["record"]}) for name, x in _SUITES["infinitebench"].items()),
    *(("scbench", name, {"id": 1, "context": "c", "multi_turns": [*turns]}) for name, turns in _TURNS.items()),
    *(
        ("ruler", name, {"input": x["context"] + x["question"], "answer_prefix": "", "outputs": ["A", "B"]})
        for name, x in _SUITES["ruler"].items()
    ),
)
_VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1.5, 71432.0, 1e300, float("nan"), float("inf"), 2**70, "", " ", "nan", "\u200b", "\ud800", [], [""],
    [[]], ["a", None], [[1]], {}, {"a": 1}, "B", ["B"], "71432", ["the"], [" Ann\n"], "E", ["Paragraph"], [1, 2],
    "\t", nested(30), ["1e5"], ["-7"], "+3", ["A", "B", "C", "D", "E"],
)  # fmt: skip
_ANSWERS: dict[str, Callable[[Sequence[str]], str]] = {  # a right answer in the form that a scorer reads
    "longbench2_choice": lambda answers: f"The correct answer is ({answers[0]})",
    "infinitebench_code_debug": lambda answers: f"{answers[1]}.",
    "infinitebench_code_run": lambda answers: answers[0],
    "infinitebench_math_find": lambda answers: format(decimal.Decimal(answers[0]), "f"),
    "infinitebench_choice": lambda answers: answers[-1],
}


# ---- right tables -------------------------------------------------------------------------------------------------


def _right(draw: _Draw, form: str) -> tuple[list[_Row], list[Example]]:
    rows, want = [], []
    for _ in range(draw(st.integers(1, 4))):
        again = draw(st.sampled_from(("no", "no", "no", "the prompt", "all"))) if rows else "no"
        row, example = _row(draw, form) if again == "no" else (dict(rows[-1]), want[-1])
        if again == "the prompt":  # with other references
            row["answer"], answers = draw(_references(example.scorer, form, example.classes))
            example = dataclasses.replace(example, answers=answers)
        rows.append(row)
        want.append(example)
    return rows, want


def _row(draw: _Draw, form: str) -> tuple[_Row, Example]:
    task = draw(st.sampled_from(list(_TASKS)))
    scorer, count = _TASKS[task], draw(st.integers(1, 98))
    cell, answers = draw(_references(scorer, form))
    row: _Row = {name: draw(texts()) for name in ("context", "question")}
    row |= {"answer_prefix": draw(st.just("") | texts(3)), "answer": cell, "task": task}
    row["max_new_tokens"] = draw(st.sampled_from((count, float(count)))) if form == "json" else count
    row["scorer"] = scorer if task in ("my own", "日本") else ""
    classes = (*answers, draw(_labels("label"))) if scorer == "longbench_class_line" else ()
    row["all_classes"] = json.dumps(list(classes)) if form == "csv" else list(classes)
    if not classes:
        row["all_classes"] = [] if form == "parquet" else ""
    same = {name: row[name] for name in ("task", *_TEXTS)}
    return row, Example(**same, answers=answers, max_new_tokens=count, scorer=scorer, classes=classes)


def _labels(word: str) -> st.SearchStrategy[str]:
    return st.integers(0, 10**6).map(lambda number: f"{word} {number}")


def _references(scorer: str, form: str, classes: tuple[str, ...] = ()) -> st.SearchStrategy[tuple[Any, tuple[str, ...]]]:
    """Draw a reference as the file has it, and as it must be read; one of ``classes`` if there are any."""
    one = lambda text: text if form == "csv" else [text]  # noqa: E731
    if scorer == "longbench_class_line":
        labels = st.just(classes[1]) if classes else _labels("class")
        return labels.map(lambda label: (one(label), classes[1:] or (label,)))
    if scorer in _NUMBERS:
        return st.sampled_from(_NUMBERS[scorer]).map(lambda text: (one(text), (text,)))
    lists = st.lists(visible_texts(), min_size=1, max_size=3)
    ways = st.sampled_from((json.dumps, repr) if form == "csv" else (list,))
    several = st.builds(lambda texts, way: (way(texts), tuple(texts)), lists, ways)
    return several if form == "parquet" else several | visible_texts().map(lambda text: (text, (text,)))


def _differs(got: list[Example], want: list[Example]) -> str | None:
    """Say what is wrong with the examples that were read; None if nothing is."""
    if len(got) != len(want):
        return f"read {len(got)} examples, expected {len(want)}"
    for number, (mine, right) in enumerate(zip(got, want, strict=True)):
        if dataclasses.replace(mine, group="") != right:
            names = [name for name in vars(right) if name != "group" and vars(mine)[name] != vars(right)[name]]
            return f"row {number}: read {names[0]} {vars(mine)[names[0]]!r}, expected {vars(right)[names[0]]!r}"
        if fault := _unfair(mine):
            return f"row {number}: {fault}"
    for i, mine in enumerate(got):
        for other in got[:i]:
            together = (mine.task, mine.context) == (other.task, other.context)
            if together != (mine.group == other.group != ""):
                return f"groups {mine.group!r} and {other.group!r} of contexts that are {'one' if together else 'two'}"
    return None


# ---- files --------------------------------------------------------------------------------------------------------


def _written(draw: _Draw, form: str, rows: list[_Row]) -> bytes:
    """Write a table in its form, with a byte-order mark or not, in one of the dialects of the form."""
    names, ascii_only = list(rows[0]), draw(st.booleans())
    if form == "parquet":
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
        return sink.getvalue()
    mark = draw(st.sampled_from((b"", b"", _MARK)))
    if form == "csv":
        stream, names = io.StringIO(newline=""), draw(st.permutations(names))
        quoting, end = draw(st.sampled_from((csv.QUOTE_MINIMAL, csv.QUOTE_ALL))), draw(st.sampled_from(("\n", "\r\n")))
        writer = csv.writer(stream, quoting=quoting, lineterminator=end)
        writer.writerows([names, *([row[name] for name in names] for row in rows)])
        return mark + stream.getvalue().encode()
    if form == "jsonl":
        end = draw(st.sampled_from(("\n", "\r\n", "\n\n", "\n \t\n")))
        return mark + end.join(json.dumps(row, ensure_ascii=ascii_only) for row in rows).encode()
    whole: Any = rows
    if form == "columns":
        whole = {name: {str(at): row[name] for at, row in enumerate(rows)} for name in names}
    return mark + json.dumps(whole, ensure_ascii=ascii_only, indent=draw(st.sampled_from((None, 1)))).encode()


def _damaged(draw: _Draw, form: str, written: bytes, want: list[Example]) -> tuple[str, bytes, list[list[Example]]]:
    """Change the file's bytes; return the change, the bytes, and the examples that may be read from them, if any may."""
    kind = draw(st.sampled_from(("cut", "other", *["encoding"] * (form != "parquet"))))
    if kind == "cut":
        size = draw(st.integers(1, len(written) - 1))
        # A text form may end early where a row ends.
        prefixes = [want[:n] for n in range(1, len(want) + 1)] if form in ("csv", "jsonl") else []
        return f"{size} bytes of {len(written)}", written[:size], prefixes
    if kind == "encoding":
        text = written.decode("utf-8-sig")
        name = draw(st.sampled_from(("utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "gb18030")))
        spoilt = text.replace("context", "conté") if name in ("latin-1", "gb18030") else text
        return f"the encoding {name}", spoilt.encode(name, "replace"), []
    lists = [json.dumps(nested(3)).encode(), json.dumps(nested(900)).encode(), b"[" * 100_000]
    return "another content", draw(st.sampled_from((b"", _MARK, b"{}", b"PK\x03\x04", b"\0" * 40, b'"x"', *lists))), []
