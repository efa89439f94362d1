"""Tables with kvpress's columns, as csv, json, jsonl or parquet.

The columns are `context, question, answer_prefix, answer` (or `answers`), `task, max_new_tokens`. A file may also have
`all_classes` (for LongBench's trec and lsht) and `scorer` (for tasks of the user's own). Other columns are ignored.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import csv
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from experiments.benchmarks import infinitebench_file, longbench_file, ruler_file
from experiments.benchmarks.base import Example, check_name
from experiments.benchmarks.records import Record, check_file, parse_json, read_json_list, read_jsonl, shown
from experiments.benchmarks.scorers import SCORERS

# kvpress names tasks as the suites do.
SCORER_OF: dict[str, str] = {
    **{task: ruler_file.FAMILIES[task.split("_")[0]].scorer for task in ruler_file.TASKS},
    **longbench_file.SCORER_OF,
    **{f"{task}-e": scorer for task, scorer in longbench_file.SCORER_OF.items()},
    **{task: form.scorer for task, form in infinitebench_file.TASKS.items()},
}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d*)?(?:e[+-]\d+)?|nan")  # as NumPy prints numbers
_SPREADSHEET = re.compile(r"[+-]?\d+\.0+|[+-]?\d(?:\.\d+)?[eE][+-]\d+")
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


@contextlib.contextmanager
def _long_fields() -> Iterator[None]:
    """Let csv read fields of more than 131,072 characters, because contexts can be longer."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _csv_rows(path: Path, limit: int | None) -> list[Record]:
    with path.open(encoding="utf-8-sig", newline="") as file, _long_fields():
        rows = csv.DictReader(file, strict=True)  # a quote that is not closed would hide the rows after it
        try:
            names = rows.fieldnames or ()
            if twice := [name for name, times in collections.Counter(names).items() if times > 1]:
                raise ValueError(f"{path}, line 1: expected columns of different names, got {twice[0]!r} twice")
            return [_csv_row(f"{path}, line {rows.line_num}", row) for row in itertools.islice(rows, limit)]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}, line {rows.reader.line_num}: expected a row of a csv in UTF-8, got {error}") from error


def _csv_row(where: str, row: dict[str | None, Any]) -> Record:
    """Refuse a row with more or fewer cells than the header, as a comma outside of quotes makes it."""
    if None in row or None in row.values():
        missing = sum(value is None for value in row.values())
        got = f"{missing} fewer" if missing else f"{len(row[None])} more"
        raise ValueError(f"{where}: expected a cell for each column, got {got}; quote cells that contain commas")
    return Record(where, row)


def _json_rows(path: Path, limit: int | None) -> list[Record]:
    """Read a list of rows, or the default form of pandas: columns that map row numbers to values."""
    start = path.read_bytes().lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if start != b"{":
        return read_json_list(path, limit)
    try:
        columns = parse_json(path.read_bytes())
        keys = dict.fromkeys(key for column in columns.values() for key in column.keys())
        rows = {key: {name: column[key] for name, column in columns.items()} for key in keys}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: expected a JSON list of rows, or columns that map row numbers to values, got neither ({error!r})"
        ) from error
    return [Record(f"{path}, row {key}", row) for key, row in itertools.islice(rows.items(), limit)]


def _parquet_rows(path: Path, limit: int | None) -> list[Record]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path}: reading parquet needs the package 'pyarrow', which is not installed and comes with no extra; "
            "install it (pip install pyarrow), or save the table as csv or jsonl"
        ) from error
    try:
        rows = pyarrow.parquet.read_table(path).slice(0, limit).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:  # damage inside of a page is an OSError
        raise ValueError(f"{path}: expected a parquet file, got {error}") from error
    return [Record(f"{path}, row {number}", row) for number, row in enumerate(rows, 1)]


ROWS: dict[str, Callable[[Path, int | None], list[Record]]] = {
    ".csv": _csv_rows,
    ".json": _json_rows,
    ".jsonl": read_jsonl,
    ".parquet": _parquet_rows,
}


def listed(text: str) -> list[Any]:
    """Parse the values in a csv field.

    Args:
        text: a list as JSON, Python or NumPy prints it, `["a", "b"]`, `['a' 'b']` or `[1. 2.]`; or any other text.

    Returns:
        The list's values, or the text itself.
    """
    body = text.strip()
    if not (body.startswith("[") and body.endswith("]")):
        return [text]
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        pass
    inner = body[1:-1]
    quoted = _QUOTED.findall(inner)
    if quoted and not _QUOTED.sub("", inner).strip(", \n"):  # Python and NumPy differ in the commas only
        return [ast.literal_eval(item) for item in quoted]
    try:
        if isinstance(values := ast.literal_eval(body), list):
            return values
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    parts = inner.split()
    if not parts or not all(map(_NUMBER.fullmatch, parts)):
        return [text]
    return [int(part) if part.removeprefix("-").isdecimal() else float(part) for part in parts]


def _listed(record: Record, name: str, *, decimals: bool = False) -> tuple[str, ...]:
    value = record.values.get(name)
    if not isinstance(value, str):
        return record.texts(name, decimals=decimals)
    return Record(record.where, {name: listed(value)}).texts(name, decimals=decimals)


def _check_cell(record: Record, name: str) -> None:
    """Refuse a csv cell in the form that spreadsheets give to whole numbers; no answer of digits alone would be right."""
    cell = record.values.get(name)
    if isinstance(cell, str) and _SPREADSHEET.fullmatch(cell.strip()):
        raise record.error(
            f"expected a reference in the field {name!r}, got {cell!r}, which a spreadsheet writes for a whole number; "
            f'write the digits, or ["{cell.strip()}"] if the answer has this form'
        )


def _scorer(record: Record, task: str) -> str:
    named = record.text("scorer") if record.has("scorer") else ""
    with record.named():
        if named:
            check_name("scorer", named, SCORERS)
        else:
            check_name("task without a column 'scorer'", task, SCORER_OF)
    return named or SCORER_OF[task]


def _max_new_tokens(record: Record) -> int:
    value = record.get("max_new_tokens", (int, float, str), "a whole number")
    digits = re.fullmatch(r"0*([0-9]{1,10})(\.0*)?", str(value).strip())
    if digits is None or not 1 <= int(digits[1]) < 2**31:
        raise record.error(f"expected a whole number from 1 to {2**31 - 1} in the field 'max_new_tokens', got {shown(value)}")
    return int(digits[1])


def read_kvpress(path: Path, limit: int | None = None) -> list[Example]:
    """Read a table with kvpress's columns.

    Args:
        path: `.csv`, `.json` (a list of rows, or columns as pandas writes them), `.jsonl` or `.parquet`.

    Raises:
        ModuleNotFoundError: the file is parquet, and pyarrow is not installed.
    """
    return grouped(path, [example_of(record, csv_cells=path.suffix == ".csv") for record in read_rows(path, limit)])


def read_rows(path: Path, limit: int | None = None) -> list[Record]:
    """Read the rows of a table by the suffix of its file; at least one row, or a ValueError as in `read_kvpress`."""
    check_file(path)
    if path.suffix not in ROWS:
        raise ValueError(f"{path}: expected one of the suffixes {', '.join(ROWS)}, got {path.suffix!r}")
    records = ROWS[path.suffix](path, limit)
    if not records:
        raise ValueError(f"{path}: expected at least one row, got none")
    return records


def example_of(record: Record, *, csv_cells: bool = False) -> Example:
    """Make the example of a row; ``csv_cells`` refuses whole numbers in the form that spreadsheets give them."""
    task = record.text("task")
    name = "answers" if record.has("answers") and not record.has("answer") else "answer"
    scorer = _scorer(record, task)
    if csv_cells and not SCORERS[scorer].numeric:
        _check_cell(record, name)
    example = Example(
        task=task,
        context=record.text("context"),
        question=record.text("question"),
        answer_prefix=record.text("answer_prefix"),
        answers=_listed(record, name, decimals=scorer == "infinitebench_math_find"),
        max_new_tokens=_max_new_tokens(record),
        scorer=scorer,
        classes=_listed(record, "all_classes") if record.has("all_classes") and record.values["all_classes"] else (),
    )
    return record.fitted(example)


def grouped(path: Path, examples: list[Example]) -> list[Example]:
    """Put examples with the same task and context into a group."""
    times = collections.Counter((example.task, example.context) for example in examples)
    groups = {key: f"{path.name}/{number}" for number, key in enumerate(times) if times[key] > 1}
    return [dataclasses.replace(e, group=groups.get((e.task, e.context), "")) for e in examples]
