"""Tables of a comparison, from its record: methods against Full, and every task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.results import Results

_LEGEND = (
    "Mean: over the tasks, in percent. Full: difference to Full on the same tasks, in points. Attended: tokens entering the "
    "softmax of a decode step, mean over layers and KV heads. Read: bytes of KV and metadata a decode step reads, in MB and "
    "as a share of Full's. Resident: bytes the cache occupies per row, in MB. Intervals of single cells (95 %, bootstrap) "
    "are in the record."
)


def rows(cells: Sequence[Sequence[Any]]) -> list[str]:
    """A markdown table; the first row is its head."""
    head, *body = [[str(cell) for cell in row] for row in cells]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body)]


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


def markdown(results: Results) -> str:
    """All tables of a comparison."""
    found = results.metrics
    names = list(dict.fromkeys(m["method"] for m in found))
    lengths = sorted({m["length"] for m in found})
    tasks = list(dict.fromkeys(m["name"] for m in found))
    full = {(m["name"], m["length"]): m for m in found if m["method"] == "full"}
    head = (
        "method",
        "length",
        "mean",
        "Full",
        "worst task",
        "attended",
        "read",
        "resident",
        "tasks",
        "seconds",
        "notes",
    )
    summary: list[Sequence[Any]] = [head]
    for name in names:
        for length in lengths:
            mine = [m for m in found if (m["method"], m["length"]) == (name, length)]
            if not mine:
                continue
            pairs = [(m["value"], full[m["name"], length]["value"]) for m in mine if (m["name"], length) in full]
            behind = float(np.mean([mine_value - best for mine_value, best in pairs])) if pairs else float("nan")
            worst = min(mine, key=lambda m: m["value"])
            read, of_full = mean(mine, "bytes_read_per_step"), mean(mine, "full_bytes_read_per_step")
            notes = [text for text in (mine[0]["note"], counters(mine)) if text]
            summary.append(
                (
                    name,
                    length,
                    f"{mean(mine, 'value'):.1f}",
                    f"{behind:+.1f}",
                    f"{worst['name']} {worst['value']:.0f}",
                    f"{mean(mine, 'attended_tokens'):.0f}",
                    f"{read / 1e6:.2f} ({100 * read / of_full:.0f} %)",
                    f"{mean(mine, 'resident_bytes_per_row') / 1e6:.1f}",
                    len(mine),
                    f"{sum(m['seconds'] for m in mine):.0f}",
                    "; ".join(notes),
                )
            )
    lines = [f"# Methods compared: {samples(found)} samples a cell" if found else "# Nothing measured yet", ""]
    lines += [*rows(summary), "", _LEGEND]
    for length in lengths:
        value = {(m["method"], m["name"]): m for m in found if m["length"] == length}
        table = [("task", *names)]
        table += [
            (task, *(f"{value[name, task]['value']:.0f}" if (name, task) in value else "" for name in names))
            for task in tasks
        ]
        lines += ["", f"## Every task at {length} tokens, in percent", "", *rows(table)]
    return "\n".join(lines) + "\n"
