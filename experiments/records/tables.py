"""Markdown tables of records, and means of their fields."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np


def rows(cells: Sequence[Sequence[Any]]) -> list[str]:
    """A markdown table; the first row is its head."""
    head, *body = [[str(cell) for cell in row] for row in cells]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]


def table_file(record: pathlib.Path) -> pathlib.Path:
    """The Markdown file for the tables of a record, or of a folder of records.

    Tables of ``docs/records`` are pages of the site and stand in ``docs/tables``; any other table stands beside its record.
    """
    folder = record.parent.parent / "tables" if record.parent.name == "records" else record.parent
    return folder / f"{record.stem}.md"


def short_commit(commit: str | None) -> str:
    """Ten digits of a commit, and whether files differed from it."""
    head, plus, _ = (commit or "not recorded").partition("+")
    return (head[:10] if commit else head) + plus + ("changes" if plus else "")


def mean(metrics: Sequence[dict[str, Any]], field: str) -> float:
    """Mean of a field over cells."""
    return float(np.mean([metric[field] for metric in metrics]))


def counters(metrics: Sequence[dict[str, Any]]) -> str:
    """Mean of every counter over cells, as text."""
    names = sorted({name for metric in metrics for name in metric["counters"]})
    means = {name: np.mean([m["counters"][name] for m in metrics if name in m["counters"]]) for name in names}
    return ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in means.items())


def samples(metrics: Sequence[dict[str, Any]]) -> str:
    """How many samples a cell has: one number, or the smallest and largest."""
    found = sorted({metric["samples"] for metric in metrics})
    return str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"
