"""Tables with kvpress's columns, and tables of a user's own questions, as csv, json, jsonl or parquet.

kvpress's columns are `context, question, answer_prefix, answer` (or `answers`), `task, max_new_tokens`. A file may also have
`all_classes` (for LongBench's trec and lsht) and `scorer` (for tasks of the user's own). Other columns are ignored.

A table of one's own questions needs `context` (or `context_file`, the path of a text beside the table), `question` and
`answer` (or `answers`, a list). The other columns may be added.
"""

import ast
import collections
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from experiments.benchmarks.records import ROWS, Record, read_records, shown
from experiments.benchmarks.scorers import SCORERS, fitted
from experiments.benchmarks.suites import FAMILIES, FORMS
from experiments.tasks import GROUPS, Example, check_name, read_text

# kvpress names tasks as the suites do.
SCORER_OF: dict[str, str] = {
    **{task: FAMILIES[task.split("_")[0]]["scorer"] for task in GROUPS["ruler"]},
    **{f"{task}{more}": form.scorer for more in ("", "-e") for task, form in FORMS["longbench"].items()},
    **{task: form.scorer for task, form in FORMS["infinitebench"].items()},
}
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d*)?(?:e[+-]\d+)?|nan")  # as NumPy prints numbers
_SPREADSHEET = re.compile(r"[+-]?\d+\.0+|[+-]?\d(?:\.\d+)?[eE][+-]\d+")
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
_OWN = {"answer_prefix": "", "max_new_tokens": 64, "scorer": "ruler_part"}  # whether the output contains a reference


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
    if isinstance(value, str):
        record = Record(record.where, {name: listed(value)})
    return record.texts(name, decimals=decimals)


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


def _example(record: Record, csv_cells: bool) -> Example:
    """Make the example of a row; ``csv_cells`` refuses whole numbers in the form that spreadsheets give them."""
    task = record.text("task")
    name = "answers" if record.has("answers") and not record.has("answer") else "answer"
    scorer = _scorer(record, task)
    if csv_cells and not SCORERS[scorer].numeric:
        _check_cell(record, name)
    example = Example(
        task,
        *(record.text(part) for part in ("context", "question", "answer_prefix")),
        answers=_listed(record, name, decimals=scorer == "infinitebench_math_find"),
        max_new_tokens=_max_new_tokens(record),
        scorer=scorer,
        classes=_listed(record, "all_classes") if record.has("all_classes") and record.values["all_classes"] else (),
    )
    return fitted(record, example)


def _grouped(path: Path, examples: list[Example]) -> list[Example]:
    """Put examples with the same task and context into a group."""
    times = collections.Counter((example.task, example.context) for example in examples)
    groups = {key: f"{path.name}/{number}" for number, key in enumerate(times) if times[key] > 1}
    return [dataclasses.replace(e, group=groups.get((e.task, e.context), "")) for e in examples]


def read_kvpress(path: Path, limit: int | None = None) -> list[Example]:
    """Read a table with kvpress's columns.

    Args:
        path: `.csv`, `.json` (a list of rows, or columns as pandas writes them), `.jsonl` or `.parquet`.
        limit: most rows to read.
    """
    return _grouped(path, [_example(record, path.suffix == ".csv") for record in read_records(path, limit, ROWS)])


def read_questions(path: Path, limit: int | None = None) -> list[Example]:
    """Read a table of a user's own questions; `path` and `limit` as of `read_kvpress`."""
    texts: dict[Path, str] = {}
    records = (_filled(record, path, texts) for record in read_records(path, limit, ROWS))
    return _grouped(path, [_example(record, path.suffix == ".csv") for record in records])


def _filled(record: Record, path: Path, texts: dict[Path, str]) -> Record:
    """Add the columns that a row leaves out; ``texts`` keeps the files that were read."""
    values = {name: value for name, value in record.values.items() if record.has(name) and value != ""}
    lacking = [
        " or ".join(map(repr, names))
        for names in (("context", "context_file"), ("question",), ("answer", "answers"))
        if not any(name in values for name in names)
    ]
    if lacking:
        raise record.error(f"expected fields {', '.join(lacking)}, got the fields {sorted(map(str, record.values))}")
    if "context" not in values:
        file = path.parent / str(values["context_file"])
        if file not in texts:
            try:
                texts[file] = read_text(file)
            except OSError as error:
                raise record.error(f"expected a text in the field 'context_file', got {file} ({error.strerror})") from error
        values["context"] = texts[file]
    filled = Record(record.where, {"task": path.stem, **_OWN, **values})
    question = filled.text("question")
    apart = "" if question[:1].isspace() else "\n\n"
    return Record(record.where, {**filled.values, "question": apart + question})
