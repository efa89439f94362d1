"""A record as text: what was measured, on what, with which settings, and its rows as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records.tables import short_commit

# The fields that can tell a record's rows apart, in the order of the table's columns.
IDENTITY = (
    "table", "arm", "name", "shape", "implementation", "model", "mesh", "method", "stream", "clusters", "shares", "length",
    "generated", "batch", "sums", "budget", "cache", "compiled", "attention",
    "depth", "question", "questions", "share", "queries", "chunk_size",
)  # fmt: skip
_VALUES = ("value", "unit", "interval_95", "least", "most", "floor", "examples", "samples", "error")
_LONGEST = 60  # characters of a cell or a setting that are shown


def describe(record: Mapping[str, Any]) -> str:
    """Describe a record as text for people, with a table of its rows.

    The columns are the fields that tell rows apart and those of the measured value; a value that all rows share is shown
    above the table instead.
    """
    rows = record["metrics"]
    known = dict.fromkeys(name for row in rows for name in row)

    def listed(values: Mapping[str, Any] | None) -> str:
        return ", ".join(f"{name} {text_of(value)}" for name, value in (values or {}).items())

    # Samples were requested, examples were measured: a file may have fewer.
    columns = [name for name in (*IDENTITY, *_VALUES) if name in known and (name != "samples" or "examples" not in known)]
    alike = {name: rows[0].get(name) for name in columns if len(rows) > 1 and len({text_of(x.get(name)) for x in rows}) == 1}
    shared = {name: value for name, value in alike.items() if value is not None}
    return "\n".join(
        [
            f"experiment  {record['experiment']}",
            f"date        {record.get('date', '')}",
            f"commit      {short_commit(record.get('commit'))}",
            f"device      {listed(record.get('device'))}",
            f"versions    {listed(record.get('versions'))}",
            f"settings    {listed(record['settings'])}",
            *([f"notes       {', '.join(record['notes'])}"] if record.get("notes") else []),
            f"rows        {len(rows)}, with the fields {', '.join(known)}" if rows else "rows        none",
            *([f"all rows    {listed(shared)}"] if shared else []),
            *([""] if rows else []),
            *text_table([name for name in columns if name not in alike], rows),
        ]
    )


def text_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format the rows as lines of text with aligned columns."""
    cells = [list(columns), *([text_of(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in cells] if columns else []


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
