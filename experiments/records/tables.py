"""Markdown tables, and a commit as a table shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def markdown_rows(cells: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a markdown table; the first row of ``cells`` is its head."""
    head, *body = [[str(cell) for cell in row] for row in cells]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]


def short_commit(commit: str | None) -> str:
    """Ten digits of a commit, and whether files differed from it."""
    head, plus, _ = (commit or "not recorded").partition("+")
    return (head[:10] if commit else head) + plus + ("changes" if plus else "")
