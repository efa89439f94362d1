"""Tables as Markdown and CSV: their lines, their files, and the short form of a commit."""

import csv
import io
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any


def markdown_rows(cells: Sequence[Sequence[Any]]) -> list[str]:
    """Format the lines of a markdown table; the first row of ``cells`` is its head. A cell may have a | or a line break."""
    head, *body = [[re.sub(r"(?<!\\)\|", r"\\|", _one_line(cell)) for cell in row] for row in cells]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]


def _one_line(cell: Any) -> str:
    return " ".join(str(cell).splitlines()) if "\n" in str(cell) else str(cell)


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as comma-separated values, with a line of names first.

    The columns are the fields of all rows, in order. None becomes an empty cell; a list or an object becomes JSON.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: json.dumps(x) if isinstance(x, (dict, list, tuple)) else x for name, x in row.items()})
    return text.getvalue()


def table_file(record: pathlib.Path) -> pathlib.Path:
    """Name the Markdown file for the tables of a record, or of a folder of records.

    Tables of ``docs/records`` are pages of the site and belong in ``docs/tables``; any other table belongs beside its record.
    """
    folder = record.parent.parent / "tables" if record.parent.name == "records" else record.parent
    return folder / f"{record.stem}.md"


def short_commit(commit: str | None) -> str:
    """Shorten a commit to ten digits, and keep the mark "+changes" of a checkout whose files differed."""
    head, plus, _ = (commit or "not recorded").partition("+")
    return (head[:10] if commit else head) + plus + ("changes" if plus else "")
