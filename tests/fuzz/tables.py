"""Users' tables of questions, right ones and ones with a fault: read as what they are, or refused with file and line."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from experiments.benchmarks import Cell, Encoded, Example, Reading, encode_cell, read, score
from models import builtin_directory
from tests.fuzz.report import Outcome
from tests.fuzz.values import nested
from tests.fuzz.verdicts import REFUSALS, verify
from tests.fuzz.words import one, random_text, visible_text

_FORMS = ("csv", "csv", "json", "columns", "jsonl", "jsonl", "parquet")
_SUFFIX = {"columns": "json"}
_TASKS = {
    "niah_single_1": "ruler_all", "qa_1": "ruler_part", "hotpotqa": "longbench_f1", "lcc": "longbench_code",
    "trec": "longbench_class_line", "passkey": "infinitebench_first_integer", "math_find": "infinitebench_math_find",
    "longdialogue_qa_eng": "infinitebench_dialogue", "my own": "quest_passkey", "日本": "scbench_any",
}  # fmt: skip
_WHOLE = ("infinitebench_first_integer", "quest_passkey")
_MAY_BE_0 = ("longbench_f1", "longbench_code")  # the suite leaves out articles, marks, and lines with marks of comments
_MARK = b"\xef\xbb\xbf"
# References that no row may have: as JSON, and as a cell of a csv.
NO_REFERENCE = (
    '""', '" "', '"\\u200b"', "NaN", "Infinity", "null", "false", "{}", "[]", '["a", ""]', "[NaN]", "[[1]]", '"nan"', "1e30",
    '["a", null]', '"\\ud800"', "[true]", '"\\n\\t"', "-1e400", '[{"a": 1}]', '"<NA>"', '"\\u3000"', "[[]]", "[1e17]",
)  # fmt: skip
NO_CELL = (
    "", " ", "nan", "<NA>", "[]", "['']", "['a', None]", "[nan]", "71432.0", "7.14E+09", "[true]", '["a", ""]', "[[1]]",
    "NaN", "[null]", "1e+20", '[" "]', "NaT", "\u200b",
)  # fmt: skip
_NO_COUNT = (0, -1, 1.5, "x", "", None, True, [], "4 tokens", "1e3", "9" * 400, "-0", float("nan"), 10**400, {}, "0.5", 2**40)
_NO_TEXT = (None, 3, 1.5, True, ["x"], {"a": 1}, "\ud800 half", float("nan"))


@dataclasses.dataclass
class Table:
    """Rows to write, and what must be read.

    Attributes:
        form: csv, json, columns (as pandas writes JSON), jsonl or parquet.
        rows: values by column.
        want: the examples, without their groups.
        fault: the fault in words; "" in a right table.
    """

    form: str
    rows: list[dict[str, Any]]
    want: list[Example]
    fault: str = ""


class Tables:
    """Random tables with kvpress's columns.

    Args:
        seed: of all cases.
        folder: for files; the caller removes it.
    """

    def __init__(self, seed: int, folder: pathlib.Path) -> None:
        self.seed, self.folder = seed, folder
        self.reading = Reading(builtin_directory() / "tokenizer.json")

    def check(self, number: int) -> Iterator[Outcome]:
        """Give the outcome of one table, and of its prompts' keys."""
        rng = np.random.default_rng([self.seed, 5, number])
        table = _right(rng)
        faulty, raw = rng.random() < 0.6, rng.random() < 0.4
        if faulty and not raw:
            table.fault = _spoil_row(table, rng)
        data = _written(table, rng)
        prefixes: list[list[Example]] = []
        if faulty and raw:
            table.fault, data, prefixes = _spoil_bytes(table, data, rng)
        file = self.folder / f"rows{number % 7}.{_SUFFIX.get(table.form, table.form)}"
        file.write_bytes(data)
        about = f"{table.form} of {len(table.rows)} rows {f'with {table.fault}' if faulty else repr(table.rows)[:200]}"

        def right(got: list[Example]) -> str | None:
            if not faulty:
                return _differs(got, table.want)
            last = int(table.form == "csv")  # nobody can see that the last cell of a csv was cut
            told = [_differs(got[: len(p) - last], p[: len(p) - last]) for p in prefixes if len(p) == len(got)]
            return told[0] if told else f"read {len(got)} examples of {len(table.want)}"

        if faulty and not prefixes:
            yield verify(about, lambda: read(f"kvpress:{file}"), right=None, named=str(file), expected=REFUSALS)
        else:
            named = str(file) if faulty else None
            yield verify(about, lambda: read(f"kvpress:{file}"), right=right, named=named)
        if not faulty and number % 4 == 0:
            yield verify(f"keys of {about}", lambda: self._keys(file, rng), right=lambda told: told, named=None)

    def _keys(self, file: pathlib.Path, rng: np.random.Generator) -> str | None:
        """Compare the keys of examples with the keys of a table in which one value differs; None if all is right."""
        given = tuple(read(f"kvpress:{file}"))
        at = int(rng.integers(len(given)))
        before, after = given[at], given[at]
        kind = one(rng, ("context", "question", "answer_prefix", "answers", "max_new_tokens", "scorer", "nothing"))
        if kind == "answers":
            after = dataclasses.replace(before, answers=(*before.answers, "9"))
        elif kind == "max_new_tokens":
            after = dataclasses.replace(before, max_new_tokens=before.max_new_tokens + 1)
        elif kind == "scorer":
            after = dataclasses.replace(before, scorer="scbench_contains")
        elif kind != "nothing":
            after = dataclasses.replace(before, **{kind: vars(before)[kind] + "!"})
        keys, other = (self._encoded(x).keys for x in (given, (*given[:at], after, *given[at + 1 :])))
        if len(set(keys)) != len(given):
            return f"{len(given)} examples have {len(set(keys))} keys"
        changed = keys[at].partition("#")[0] != other[at].partition("#")[0]
        return None if changed == (kind != "nothing") else f"another {kind}: key {keys[at]}, then {other[at]}"

    def _encoded(self, given: tuple[Example, ...]) -> Encoded:
        return encode_cell(self.reading, Cell("a task", None, len(given), given=given))


# ---- right tables -------------------------------------------------------------------------------------------------


def _right(rng: np.random.Generator) -> Table:
    form = one(rng, _FORMS)
    rows, want = [], []
    for _ in range(int(rng.integers(1, 5))):
        if rows and rng.random() < 0.25:  # the same prompt again, with the same references or not
            row, example = dict(rows[-1]), want[-1]
            if rng.random() < 0.5:
                row["answer"], answers = _reference(example.scorer, form, rng, example.classes)
                example = dataclasses.replace(example, answers=answers)
        else:
            row, example = _row(form, rng)
        rows.append(row)
        want.append(example)
    return Table(form, rows, want)


def _row(form: str, rng: np.random.Generator) -> tuple[dict[str, Any], Example]:
    task = one(rng, list(_TASKS))
    scorer = _TASKS[task]
    cell, answers = _reference(scorer, form, rng)
    count = int(rng.integers(1, 99))
    row: dict[str, Any] = {name: random_text(rng) for name in ("context", "question")}
    row |= {"answer_prefix": random_text(rng, 3) if rng.random() < 0.5 else "", "answer": cell, "task": task}
    row["max_new_tokens"] = one(rng, (count, float(count))) if form == "json" else count
    row["scorer"] = scorer if task in ("my own", "日本") else ""
    classes = ()
    if scorer == "longbench_class_line":
        classes = (*answers, f"label {int(rng.integers(10**6))}")
    row["all_classes"] = list(classes) if form in ("json", "columns", "jsonl", "parquet") else json.dumps(list(classes))
    if not classes:
        row["all_classes"] = [] if form == "parquet" else ""
    texts = {name: row[name] for name in ("task", "context", "question", "answer_prefix")}
    return row, Example(**texts, answers=answers, max_new_tokens=count, scorer=scorer, classes=classes)


def _reference(
    scorer: str, form: str, rng: np.random.Generator, classes: tuple[str, ...] = ()
) -> tuple[Any, tuple[str, ...]]:
    """Draw a reference as the file has it, and as it must be read; one of ``classes`` if there are any."""
    if classes:
        return (classes[1] if form == "csv" else [classes[1]]), classes[1:]
    if scorer in _WHOLE:
        number = one(rng, (7, 71432, 2**53 + 1, 2**80 + 1, 10**30))
        if form in ("json", "columns", "jsonl"):
            return one(rng, (number, str(number), f"{number}.0", float(number) if number < 2**53 else number)), (str(number),)
        return ([str(number)] if form == "parquet" else one(rng, (str(number), f"{number}.0", f" {number}"))), (str(number),)
    if scorer == "infinitebench_math_find":
        pairs = ((7, "7"), (0.5, "0.5"), (1e-05, "0.00001"), (7.0, "7.0"), (2**60 + 1, str(2**60 + 1)))
        number, text = one(rng, pairs)
        return (number if form in ("json", "columns", "jsonl") else [text] if form == "parquet" else text), (text,)
    if scorer == "longbench_class_line":
        label = f"class {int(rng.integers(10**6))}"
        return [label] if form != "csv" else label, (label,)
    several = tuple(visible_text(rng) for _ in range(int(rng.integers(1, 4))))
    if form == "parquet":
        return list(several), several
    if form == "csv":
        if len(several) == 1 and rng.random() < 0.5:
            return several[0], several
        return one(rng, (json.dumps(list(several)), repr(list(several)))), several
    if scorer in ("ruler_all", "ruler_part") and rng.random() < 0.3:
        number, text = one(rng, ((71432, "71432"), (71432.0, "71432"), (0.25, "0.25"), (2**70, str(2**70)), (-3, "-3")))
        return one(rng, (number, [number])), (text,)
    return (several[0] if len(several) == 1 and rng.random() < 0.5 else list(several)), several


def _differs(got: list[Example], want: list[Example]) -> str | None:
    """Say what is wrong with the examples that were read; None if nothing is."""
    if len(got) != len(want):
        return f"read {len(got)} examples, expected {len(want)}"
    for number, (mine, right) in enumerate(zip(got, want, strict=True)):
        if dataclasses.replace(mine, group="") != right:
            names = [name for name in vars(right) if name != "group" and vars(mine)[name] != vars(right)[name]]
            return f"row {number}: read {names[0]} {vars(mine)[names[0]]!r}, expected {vars(right)[names[0]]!r}"
        if score(mine, "") != 0:
            return f"row {number}: an empty answer scores {score(mine, '')} with the references {mine.answers}"
        if mine.scorer not in _MAY_BE_0 and not score(mine, "\n".join(mine.answers)) > 0:
            return f"row {number}: the references {mine.answers} score 0 as answer under {mine.scorer}"
    for i, mine in enumerate(got):
        for other in got[:i]:
            together = (mine.task, mine.context) == (other.task, other.context)
            if together != (mine.group == other.group != ""):
                return f"groups {mine.group!r} and {other.group!r} of contexts that are {'one' if together else 'two'}"
    return None


# ---- files --------------------------------------------------------------------------------------------------------


def _written(table: Table, rng: np.random.Generator) -> bytes:
    """Write a table in its form, with a byte-order mark or not, in one of the dialects of the form."""
    form, rows = table.form, table.rows
    if form == "parquet":
        sink = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
        return sink.getvalue()
    mark = _MARK if rng.random() < 0.3 else b""
    if form == "csv":
        stream = io.StringIO(newline="")
        names = list(dict.fromkeys(name for row in rows for name in row))
        rng.shuffle(names)
        quoting = one(rng, (csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
        writer = csv.writer(stream, quoting=quoting, lineterminator=one(rng, ("\n", "\r\n")))
        writer.writerows([names, *([row[name] for name in names if name in row] for row in rows)])
        return mark + stream.getvalue().encode("utf-8", "surrogatepass")
    ascii_only = table.fault != "" or rng.random() < 0.5
    if form == "jsonl":
        end = one(rng, ("\n", "\r\n", "\n\n", "\n \t\n"))
        return mark + end.join(json.dumps(row, ensure_ascii=ascii_only) for row in rows).encode()
    whole: Any = rows
    if form == "columns":
        names = list(dict.fromkeys(name for row in rows for name in row))
        whole = {name: {str(at): row[name] for at, row in enumerate(rows) if name in row} for name in names}
    return mark + json.dumps(whole, ensure_ascii=ascii_only, indent=one(rng, (None, 1))).encode()


def _spoil_row(table: Table, rng: np.random.Generator) -> str:
    """Change one row so that no reader may take it; return the change in words."""
    if table.form == "parquet":
        table.form = "jsonl"
        table.rows = [dict(row) for row in table.rows]
    form, at = table.form, int(rng.integers(len(table.rows)))
    row = table.rows[at] = dict(table.rows[at])
    kinds = ["reference", "reference", "count", "task", "scorer", "column"] + ["text"] * (form != "csv")
    kind = one(rng, kinds)
    if kind == "reference":
        value = one(rng, NO_CELL) if form == "csv" else json.loads(one(rng, NO_REFERENCE))
        if form == "csv":
            row |= {"task": "niah_single_1", "scorer": ""}
        row["answer"] = value
        return f"the reference {value!r}"
    if kind == "count":
        value = one(rng, _NO_COUNT)
        row["max_new_tokens"] = value
        return f"max_new_tokens {value!r:.40}"
    if kind == "task":
        row |= {"task": "no such task", "scorer": ""}
        return "an unknown task"
    if kind == "scorer":
        row["scorer"] = one(rng, ("f1", "ruler", " ruler_all ", "None"))
        return f"the scorer {row['scorer']!r}"
    names = ("context", "question", "answer_prefix", "answer", "task", "max_new_tokens")
    name = one(rng, names)
    if kind == "column":
        for other in table.rows if form == "csv" else [row]:
            other.pop(name, None)
        return f"no {name}"
    name = one(rng, names[:3])
    row[name] = one(rng, _NO_TEXT)
    return f"the {name} {row[name]!r}"


def _spoil_bytes(table: Table, data: bytes, rng: np.random.Generator) -> tuple[str, bytes, list[list[Example]]]:
    """Change the file's bytes; return the change, the bytes, and the examples that may be read from them, if any may."""
    form, want = table.form, table.want
    kind = one(rng, ("cut", "cut", "encoding", "empty", "other", "nested", "twice"))
    if kind == "cut" and len(data) > 1:
        size = int(rng.integers(1, len(data)))
        # A text form may end early where a row ends.
        lines = [] if form in ("parquet", "json", "columns") else [want[:n] for n in range(1, len(want) + 1)]
        return f"{size} bytes of {len(data)}", data[:size], lines
    if kind == "encoding" and form != "parquet":
        text = data.decode("utf-8-sig", "surrogatepass")
        name = one(rng, ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "gb18030"))
        spoilt = (text.replace("context", "conté") if name in ("latin-1", "gb18030") else text).encode(name, "replace")
        return f"the encoding {name}", spoilt, []
    if kind == "empty":
        return "nothing in it", bytes(one(rng, (b"", b"\n \n", _MARK, b"[]", b"{}"))), []
    if kind == "other":
        return "another content", bytes(one(rng, (b"PK\x03\x04", b"<html></html>", b"\x00" * 40, b"3", b'"x"', b"null"))), []
    if kind == "twice" and form in ("csv", "jsonl", "json"):
        if form == "csv":
            head, _, rest = data.partition(b"\n")
            return "two columns of one name", head.replace(b"question", b"context") + b"\n" + rest, []
        return "a key twice", data.replace(b'"question": ', b'"context": ', 1), []
    text = json.dumps(nested(int(one(rng, (3, 900))))).encode() if rng.random() < 0.5 else b"[" * 100_000
    return "nested lists", text, []
