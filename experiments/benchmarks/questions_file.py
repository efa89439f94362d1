"""Tables of a user's own questions: a context, a question and its answer, as csv, json, jsonl or parquet.

The columns are `context` (or `context_file`, the path of a text beside the table), `question` and `answer` (or `answers`, a
list). The columns of kvpress's tables may be added: `task`, `answer_prefix`, `max_new_tokens`, `scorer`, `all_classes`.
"""

from __future__ import annotations

from pathlib import Path

from experiments.benchmarks.base import Example
from experiments.benchmarks.kvpress_file import example_of, grouped, read_rows
from experiments.benchmarks.records import Record
from experiments.tasks import read_text

_SCORER = "ruler_part"  # whether the output contains a reference, whatever the case
_NEW_TOKENS = 64


def read_questions(path: Path, limit: int | None = None) -> list[Example]:
    """Read a table of a user's own questions.

    Args:
        path: `.csv`, `.json` (a list of rows, or columns as pandas writes them), `.jsonl` or `.parquet`.

    Raises:
        ValueError: the file or a text of `context_file` does not exist, its suffix is unknown, it has no rows, or a row
            lacks a column; the message names the file, the line, what was found and what was expected.
        ModuleNotFoundError: the file is parquet, and pyarrow is not installed.
    """
    records, texts = read_rows(path, limit), dict[Path, str]()
    examples = [example_of(_filled(record, path, texts), csv_cells=path.suffix == ".csv") for record in records]
    return grouped(path, examples)


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
    standard = {"task": path.stem, "answer_prefix": "", "max_new_tokens": _NEW_TOKENS, "scorer": _SCORER}
    filled = Record(record.where, {**standard, **values})
    question = filled.text("question")
    apart = "" if question[:1].isspace() else "\n\n"
    return Record(record.where, {**filled.values, "question": apart + question})
