"""A record as text: what was measured, on what, with which settings, and its rows as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records.tables import csv_table, short_commit

# The fields that can tell a record's rows apart, in the order of the table's columns.
IDENTITY = (
    "table", "arm", "name", "shape", "implementation", "model", "mesh", "method", "stream", "clusters", "shares", "length",
    "generated", "batch", "sums", "budget", "cache", "compiled", "attention",
    "depth", "question", "questions", "share", "queries", "chunk_size",
)  # fmt: skip
_VALUES = ("value", "unit", "interval_95", "least", "most", "floor", "examples", "samples", "error")
_LONGEST = 60  # characters of a cell or a setting that are shown


def describe(record: Mapping[str, Any], fields: Sequence[str] = ()) -> str:
    """Describe a record as text for people, with a table of its rows.

    Without fields, the columns are the fields that tell rows apart and those of the measured value; a value that all rows
    share is shown above the table instead.
    """
    rows = record.get("metrics") or []
    device = record.get("device") or {}
    lines = [
        f"experiment  {record.get('experiment', '')}",
        f"date        {record.get('date', '')}",
        f"commit      {short_commit(record.get('commit'))}",
        f"device      {', '.join(f'{name} {value}' for name, value in device.items())}",
        f"versions    {', '.join(f'{name} {value}' for name, value in (record.get('versions') or {}).items())}",
        "settings    " + ", ".join(f"{name} {text_of(value)}" for name, value in (record.get("settings") or {}).items()),
    ]
    known = list(dict.fromkeys(name for row in rows for name in row))
    shown = chosen_fields(record, fields)
    if notes := record.get("notes"):
        lines.append(f"notes       {', '.join(notes)}")
    lines.append(f"rows        {len(rows)}, with the fields {', '.join(known)}" if rows else "rows        none")
    columns = shown
    if not fields:
        alike = {name for name in shown if len(rows) > 1 and len({text_of(row.get(name)) for row in rows}) == 1}
        shared = [f"{name} {text_of(rows[0][name])}" for name in shown if name in alike and rows[0].get(name) is not None]
        lines += [f"all rows    {', '.join(shared)}"] * bool(shared)
        columns = [name for name in shown if name not in alike]
    return "\n".join([*lines, *([""] if rows else []), *text_table(columns, rows)])


def chosen_fields(record: Mapping[str, Any], fields: Sequence[str] = ()) -> list[str]:
    """List the columns of a record's table, see `describe`; fields that no row has are refused."""
    known = list(dict.fromkeys(name for row in record.get("metrics") or [] for name in row))
    if unknown := [name for name in fields if name not in known]:
        raise ValueError(f"no row has the field {unknown[0]!r}; fields: {', '.join(known) or 'none'}")
    if fields:
        return list(fields)
    shown = [name for name in (*IDENTITY, *_VALUES) if name in known]
    # Samples were requested, examples were measured: a file may have fewer.
    return [name for name in shown if name != "samples" or "examples" not in known]


def record_csv(record: Mapping[str, Any], fields: Sequence[str] = ()) -> str:
    """Format a record's rows as comma-separated values; without fields, with all of them."""
    rows = record["metrics"]
    names = chosen_fields(record, fields) if fields else list(dict.fromkeys(name for row in rows for name in row))
    return csv_table([{name: row.get(name) for name in names} for row in rows])


def text_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows as lines of text with aligned columns."""
    if not columns:
        return []
    cells = [list(columns), *([text_of(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]


def text_of(value: Any) -> str:
    """Format a value in a few characters."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        text = ", ".join(text_of(part) for part in value)
    else:
        text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
