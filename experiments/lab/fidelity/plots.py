"""Draws the figures of a record of `experiments.lab.fidelity`: distance against bytes, and distance along the text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.answering import PAPERS
from experiments.lab.fidelity.report import FULL, Row, cells
from experiments.records import (
    QUIET,
    REFERENCE,
    amount_axis,
    chosen,
    error_bars,
    legend,
    line_style,
    method_title,
    new_figure,
    quiet_label,
    tidy,
    token_label,
)

_NAMES = 3  # in a row of the legend, for each panel across
_LEAST = 1e-7  # nats; float32 does not tell smaller distances from zero


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Return the figures of a record, for ``kvjax plot``: functions by name, and the names of the usual figures.

    A record of Full alone has no usual figure.
    """
    made = {"fidelity": functools.partial(distance, record), "along": functools.partial(along, record)}
    return made, list(made) if _apart(record) else []


def distance(record: Mapping[str, Any]) -> Any:
    """Plot KL against bytes read per decode step: a panel for each stream and length, a line of budgets for each method.

    Raises:
        ValueError: no method is at a distance from Full.
    """
    panels, order, figure = _panels(record)
    coloured = _coloured(record, order)
    for panel, (cell, rows) in panels:
        drawn: list[Row] = []
        for name in order:
            line = sorted((row for row in rows if _name(row) == name), key=lambda row: row["bytes_read_per_step"])
            if not line:
                continue
            style = line_style(coloured.index(name)) if name in coloured else QUIET
            at = [row["bytes_read_per_step"] / 1e6 for row in line]
            panel.plot(at, [row["value"] for row in line], label=_label(name, order, coloured), **style)
            error_bars(panel, at, [[max(end, _LEAST) for end in row["interval_95"]] for row in line], style["color"])
            drawn += line
        full = drawn[0]["full_bytes_read_per_step"] / 1e6
        panel.axvline(full, color=REFERENCE, linestyle="--", linewidth=1, label="bytes under Full")
        amount_axis(panel, [full, *(row["bytes_read_per_step"] / 1e6 for row in drawn)], axis="x")
        panel.set_yscale("log")
        tidy(panel, _title(cell), "MB read per decode step", "KL(Full || method), nats")
    legend(figure, [panel for panel, _ in panels], _NAMES * len({cell[1] for _, (cell, _) in panels}))
    return figure


def along(record: Mapping[str, Any]) -> Any:
    """Plot KL against the number of the step, each method at the middle one of its budgets.

    Raises:
        ValueError: no method is at a distance from Full.
    """
    panels, order, figure = _panels(record)
    coloured = _coloured(record, order)
    for panel, (cell, rows) in panels:
        for name in order:
            line = sorted((row for row in rows if _name(row) == name), key=lambda row: row["bytes_read_per_step"])
            if line:
                means = line[len(line) // 2]["along"]
                style = line_style(coloured.index(name)) if name in coloured else QUIET
                panel.plot(means["steps"], np.maximum(means["kl"], _LEAST), label=_label(name, order, coloured), **style)
        panel.set_yscale("log")
        tidy(panel, _title(cell), "decode step", "KL(Full || method), nats")
    legend(figure, [panel for panel, _ in panels], _NAMES * len({cell[1] for _, (cell, _) in panels}))
    return figure


def _panels(record: Mapping[str, Any]) -> tuple[list[tuple[Any, tuple[tuple[str, int], list[Row]]]], list[str], Any]:
    """Make the panels, each with its (stream, length) and rows, the methods in the order of their styles, and the figure."""
    rows = _apart(record)
    if not rows:
        raise ValueError("a figure of distances needs a method besides Full, got none")
    grouped = cells(rows)
    streams, lengths = (list(dict.fromkeys(cell[at] for cell in grouped)) for at in (0, 1))
    figure = new_figure(1 + 4.2 * len(lengths), 1.2 + 3.6 * len(streams))
    grid = figure.subplots(len(streams), len(lengths), squeeze=False)
    made = []
    for (stream, length), mine in grouped.items():
        made.append((grid[streams.index(stream), lengths.index(length)], ((stream, length), mine)))
    used = [panel for panel, _ in made]
    for panel in grid.ravel():
        if panel not in used:
            panel.set_axis_off()
    return made, list(dict.fromkeys(_name(row) for row in rows)), figure


def _apart(record: Mapping[str, Any]) -> list[Row]:
    """Select the rows at a distance from Full, which a figure can show."""
    return [row for row in record["metrics"] if row["method"] != FULL and row["value"] > 0]


def _coloured(record: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Choose the methods with a colour: the papers' methods, then the methods of the least KL."""
    least: dict[str, float] = {}
    for row in _apart(record):
        least[_name(row)] = min(least.get(_name(row), row["value"]), row["value"])
    return chosen(names, [*PAPERS, *sorted(names, key=lambda name: least[name])])


def _label(name: str, names: Sequence[str], coloured: Sequence[str]) -> str:
    """Write a method's entry in the legend; all methods in grey share one."""
    quiet = [method_title(other) for other in names if other not in coloured]
    return method_title(name) if name in coloured else quiet_label(quiet, 40)


def _name(row: Row) -> str:
    return row["method"].partition("(")[0]


def _title(cell: tuple[str, int]) -> str:
    return f"{cell[0]}, {token_label(cell[1])} tokens"
