"""Draws the figures of a record of `experiments.lab.fidelity`: distance against bytes, and distance along the text."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import records
from experiments.answering import PAPERS
from experiments.lab.fidelity.report import FULL, Row, cells

_NAMES = 3  # in a row of the legend, for each panel across
_LEAST = 1e-7  # nats; float32 does not tell smaller distances from zero


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Return the figures of a record: functions by name, and the names of the usual figures.

    A record of Full alone has no usual figure.
    """
    kinds = {"fidelity": functools.partial(distance, record), "along": functools.partial(along, record)}
    return kinds, list(kinds) if _apart(record) else []


def distance(record: Mapping[str, Any]) -> Any:
    """Plot KL against bytes read per decode step: a panel for each stream and length, a line of budgets for each method.

    Raises:
        ValueError: no method is at a distance from Full.
    """

    def line(panel: Any, budgets: Sequence[Row], style: Mapping[str, Any]) -> None:
        read = [row["bytes_read_per_step"] / 1e6 for row in budgets]
        panel.plot(read, [row["value"] for row in budgets], **style)
        records.error_bars(panel, read, [[max(end, _LEAST) for end in row["interval_95"]] for row in budgets], style["color"])

    figure, panels = _panels(record, line, "MB read per decode step")
    for panel, rows in panels:
        full = rows[0]["full_bytes_read_per_step"] / 1e6
        panel.axvline(full, color=records.REFERENCE, linestyle="--", linewidth=1, label="bytes under Full")
        records.amount_axis(panel, [full, *(row["bytes_read_per_step"] / 1e6 for row in rows)], axis="x")
    return _with_legend(figure, panels)


def along(record: Mapping[str, Any]) -> Any:
    """Plot KL against the number of the step, each method at the middle one of its budgets.

    Raises:
        ValueError: no method is at a distance from Full.
    """

    def line(panel: Any, budgets: Sequence[Row], style: Mapping[str, Any]) -> None:
        means = budgets[len(budgets) // 2]["along"]
        panel.plot(means["steps"], np.maximum(means["kl"], _LEAST), **style)

    return _with_legend(*_panels(record, line, "decode step"))


def _panels(record: Mapping[str, Any], line: Callable[..., None], xlabel: str) -> tuple[Any, list[tuple[Any, list[Row]]]]:
    """Make the figure, with a panel for each stream and length in which ``line`` draws the budgets of each method."""
    rows = _apart(record)
    if not rows:
        raise ValueError("a figure of distances needs a method besides Full, got none")
    grouped, names = cells(rows), list(dict.fromkeys(map(_name, rows)))
    least: dict[str, float] = {}
    for row in rows:
        least[_name(row)] = min(least.get(_name(row), row["value"]), row["value"])
    # The papers' methods have a colour, then the methods of the least KL; the others are grey and share an entry.
    coloured = records.chosen(names, [*PAPERS, *sorted(names, key=least.__getitem__)])
    styles = dict(zip(coloured, records.method_styles(coloured), strict=True))
    quiet = records.quiet_label([records.method_title(name) for name in names if name not in coloured], 40)
    streams, lengths = (list(dict.fromkeys(cell[at] for cell in grouped)) for at in (0, 1))
    figure = records.new_figure(1 + 4.2 * len(lengths), 1.2 + 3.6 * len(streams))
    grid = figure.subplots(len(streams), len(lengths), squeeze=False)
    for panel in grid.ravel():
        panel.set_axis_off()
    panels = []
    for (stream, length), mine in grouped.items():
        panel = grid[streams.index(stream), lengths.index(length)]
        panel.set_axis_on()
        for name in names:
            if budgets := sorted((row for row in mine if _name(row) == name), key=lambda row: row["bytes_read_per_step"]):
                style = styles.get(name, records.QUIET)
                line(panel, budgets, {**style, "label": records.method_title(name) if name in coloured else quiet})
        panel.set_yscale("log")
        records.tidy(panel, f"{stream}, {records.token_label(length)} tokens", xlabel, "KL(Full || method), nats")
        panels.append((panel, mine))
    return figure, panels


def _with_legend(figure: Any, panels: Sequence[tuple[Any, list[Row]]]) -> Any:
    lengths = {rows[0]["length"] for _, rows in panels}
    records.legend(figure, [panel for panel, _ in panels], _NAMES * len(lengths))
    return figure


def _apart(record: Mapping[str, Any]) -> list[Row]:
    """Select the rows at a distance from Full, which a figure can show."""
    return [row for row in record["metrics"] if row["method"] != FULL and row["value"] > 0]


def _name(row: Row) -> str:
    return row["method"].partition("(")[0]
