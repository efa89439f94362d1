"""What the jobs of `experiments.speed` share: how a run begins and ends in its record, and cells of its tables."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from experiments.cli import Against
from experiments.records import Results, table_file, write_bytes

Row = Mapping[str, Any]
_FAILED = "failed; their errors are in the record"


def now() -> str:
    """The name of a run that begins now."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")


def note_run(results: Results, run: str, about: Mapping[str, Any]) -> None:
    """Write what a run measured with (commit, versions, device) into the record, under the run's name."""
    results.change("runs", lambda runs: {**(runs or {}), run: dict(about)})


def finish(results: Results, tables: str, against: Against, failed: int, told: str = _FAILED) -> None:
    """Write the tables beside the record, compare it if asked, and say how many rows failed.

    Args:
        results: the record.
        tables: the text of its tables.
        against: what to compare it with.
        failed: how many rows failed.
        told: what is said of them.

    Raises:
        SystemExit: a row failed.
    """
    write_bytes(table_file(results.path), tables.encode())
    print(f"record: {results.path}")
    against.show(results.path)
    if failed:
        raise SystemExit(f"{failed} rows {told}")


def run_line(run: str, about: Mapping[str, Any], more: str = "") -> str:
    """A line about a run on JAX, below a table."""
    return f"Run {run}: {about['device']}, JAX {about['versions']['jax']}, commit {about['commit']}{more}."


def failure(row: Row, most: int = 200) -> str:
    """Why a row has no value: one line of at most ``most`` characters, which can stand in a table."""
    if row.get("out_of_memory"):
        return "out of memory"
    return (row["error"].splitlines() or [""])[0][:most].replace("|", "/")


def spread(row: Row, scale: float, digits: int) -> str:
    """The median of a row's repeats, with the least and the most in brackets, each times ``scale``."""
    value, least, most = (f"{scale * row[field]:.{digits}f}" for field in ("value", "least", "most"))
    return f"{value} ({least} - {most})"


def scaled(value: float | None, scale: float, style: str) -> str:
    """A number times ``scale``, or nothing where there is none."""
    return "" if value is None else format(value * scale, style)
