"""Parts that the jobs of `experiments.speed` share: the begin and end of a run in its record, and cells of its tables."""

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records import Results, table_file, write_bytes

Row = Mapping[str, Any]


def now() -> str:
    """Return the name of a run that begins now."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def note_run(results: Results, run: str, about: Mapping[str, Any]) -> None:
    """Write the facts about a run (commit, versions, device) into the record, under the run's name."""
    results.change("runs", lambda runs: {**(runs or {}), run: dict(about)})


def finish(results: Results, tables: str, failed: int, told: str = "failed; their errors are in the record") -> None:
    """Write the tables beside the record, and say how many rows failed.

    Args:
        results: the record.
        tables: the text of its tables.
        failed: how many rows failed.
        told: the message about failed rows, after their number.

    Raises:
        SystemExit: a row failed.
    """
    write_bytes(table_file(results.path), tables.encode())
    print(f"record: {results.path}")
    if failed:
        raise SystemExit(f"{failed} rows {told}")


def run_line(run: str, about: Mapping[str, Any], more: str = "") -> str:
    """Format a line about a run on JAX, which stands below a table."""
    return f"Run {run}: {about['device']}, JAX {about['versions']['jax']}, commit {about['commit']}{more}."


def titled(text: str, metrics: Sequence[Row], notes: Mapping[str, Any]) -> str:
    """Add the card that the rows were measured on to a title, and how many of them the largest mesh has."""
    cards = dict.fromkeys(about["device"] for about in notes.get("runs", {}).values())
    meshes = [re.findall(r"=(\d+)", row.get("mesh") or "") for row in metrics]
    count = max([math.prod(map(int, sizes)) for sizes in meshes], default=1)
    card = " and ".join(f"{count} x {card}" if count > 1 else card for card in cards)
    return f"# {text}" + (f", {card}" if card else "")


def failure(row: Row, most: int = 200) -> str:
    """Explain why a row has no value, in one line of at most ``most`` characters that can stand in a table."""
    if row.get("out_of_memory"):
        return "out of memory"
    return (row["error"].splitlines() or [""])[0][:most].replace("|", "/")


def spread(row: Row, scale: float, digits: int) -> str:
    """Format the median of a row's repeats, with least and most in brackets, each times ``scale``; a failed row gives ""."""
    if row["value"] is None:
        return ""
    value, least, most = (f"{scale * row[field]:.{digits}f}" for field in ("value", "least", "most"))
    return f"{value} ({least} - {most})"


def scaled(value: float | None, scale: float, style: str) -> str:
    """Format a value times ``scale``; None gives an empty text."""
    return "" if value is None else format(value * scale, style)
