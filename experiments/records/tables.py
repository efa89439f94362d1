"""Markdown tables: their lines, their files, and the short form of a commit."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any


def markdown_rows(cells: Sequence[Sequence[Any]]) -> list[str]:
    """Format the lines of a markdown table; the first row of ``cells`` is its head."""
    head, *body = [[str(cell) for cell in row] for row in cells]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]


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
