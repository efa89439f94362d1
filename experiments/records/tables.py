"""Markdown tables: their lines, their files, and a commit as a table shows it."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any


def markdown_rows(cells: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a markdown table; the first row of ``cells`` is its head."""
    head, *body = [[str(cell) for cell in row] for row in cells]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]


def table_file(record: pathlib.Path) -> pathlib.Path:
    """The Markdown file for the tables of a record, or of a folder of records.

    Tables of ``docs/records`` are pages of the site and belong in ``docs/tables``; any other table belongs beside its record.
    """
    folder = record.parent.parent / "tables" if record.parent.name == "records" else record.parent
    return folder / f"{record.stem}.md"


def short_commit(commit: str | None) -> str:
    """Ten digits of a commit, and whether files differed from it."""
    head, plus, _ = (commit or "not recorded").partition("+")
    return (head[:10] if commit else head) + plus + ("changes" if plus else "")
