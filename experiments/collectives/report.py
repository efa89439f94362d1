"""What `experiments.collectives` prints and writes: a line for each row as it is finished, and markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records import markdown_rows
from experiments.speed import SUM_VARIANTS

Row = Mapping[str, Any]

_LEGEND = (
    "Microseconds of a sum, median of the repeats. Sums follow each other, each of the result of the sum before it times a "
    "number; the time of the same program without sums is subtracted. Chain: a program that is nothing but such sums. Loop: "
    "they are the body of a loop in one program, as the layers of decode steps are. Every result is compared with a sum in "
    "float64. Options that are lists replace XLA's default list."
)


def line(row: Row) -> str:
    """A row as a printed line."""
    begin = f"{row['variant']:21s} {row['form']:5s} {row['dtype']:8s} {size_text(row['bytes']):>7s}"
    if row["error"] is not None:
        return f"{begin}  {_short(row['error'])}"
    found = ", ".join(f"{count} {name}" for name, count in row["instructions"].items())
    return f"{begin} {1e6 * row['value']:9.2f} us  {found}{'' if row['passed'] else '  WRONG'}"


def size_text(size: int) -> str:
    """Bytes as a text such as 8 KB; 1 KB is 1024 bytes."""
    for unit, of in (("MB", 1 << 20), ("KB", 1 << 10)):
        if size % of == 0:
            return f"{size // of} {unit}"
    return f"{size} B"


def sum_tables(metrics: Sequence[Row], notes: Mapping[str, Any]) -> str:
    """All tables of a record, and a line for each run.

    Args:
        metrics: the record's rows.
        notes: the record's notes.
    """
    lines = ["# Sums over devices", "", "How long a sum over the devices of a mesh takes, in each way that there is.", ""]
    for mesh, dtype, form in dict.fromkeys((row["mesh"], row["dtype"], row["form"]) for row in metrics):
        mine = [row for row in metrics if (row["mesh"], row["dtype"], row["form"]) == (mesh, dtype, form)]
        sizes = sorted({row["bytes"] for row in mine})
        body = []
        for name in dict.fromkeys(row["variant"] for row in mine):
            cells = {row["bytes"]: _cell(row) for row in mine if row["variant"] == name}
            body.append([name, *(cells.get(size, "") for size in sizes)])
        lines += [f"## {form.capitalize()}, {dtype}, {mesh}", ""]
        lines += [*markdown_rows([("variant", *map(size_text, sizes)), *body]), ""]
    lines += [_LEGEND, "", "## Variants", ""]
    lines += [*markdown_rows([("variant", "what", "sum", "settings"), *_variants(metrics)]), ""]
    if failed := [row for row in metrics if row["error"] is not None]:
        body = [[row["variant"], row["form"], row["dtype"], size_text(row["bytes"]), _short(row["error"])] for row in failed]
        lines += ["## What failed", "", *markdown_rows([("variant", "form", "dtype", "size", "error"), *body]), ""]
    for run, about in notes.get("runs", {}).items():
        device = about["device"]
        lines.append(
            f"Run {run}: {device['count']} x {device['kind']}, JAX {about['versions']['jax']}, commit {about['commit']}."
        )
    return "\n".join(lines) + "\n"


def _cell(row: Row) -> str:
    if row["error"] is not None:
        return "failed"
    return f"{1e6 * row['value']:.1f}{'' if row['passed'] else ' (wrong)'}"


def _variants(metrics: Sequence[Row]) -> list[list[str]]:
    rows = {row["variant"]: row for row in metrics}
    body = []
    for name, row in rows.items():
        about = SUM_VARIANTS[name].about if name in SUM_VARIANTS else ""
        settings = [f"`{key}={value}`" for part in ("options", "environment") for key, value in row[part].items()]
        body.append([name, about, row["sum"], " ".join(settings)])
    return body


def _short(error: str) -> str:
    return error.splitlines()[0][:200].replace("|", "/")
