"""The figure of a record of `experiments.collectives`: microseconds of a sum against its bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.records import legend, line_style, new_figure, tidy


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """The figures of a record, for ``kvjax plot``: functions by name, and the names of the usual figures."""
    return {"collectives": functools.partial(latency, record["metrics"])}, ["collectives"]


def latency(metrics: Sequence[Mapping[str, Any]]) -> Any:
    """Time against size: a panel for each dtype and form, a line for each variant.

    Raises:
        ValueError: no row has a time.
    """
    done = [row for row in metrics if row["error"] is None and row["value"] > 0]
    if not done:
        raise ValueError("no row of the record has a time")
    order = list(dict.fromkeys(row["variant"] for row in done))
    groups = list(dict.fromkeys((row["form"], row["dtype"]) for row in done))
    figure = new_figure(5.5 * len(groups), 4.5)
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for panel, (form, dtype) in zip(panels, groups, strict=True):
        for index, name in enumerate(order):
            mine = [row for row in done if (row["form"], row["dtype"], row["variant"]) == (form, dtype, name)]
            mine.sort(key=lambda row: row["bytes"])
            if mine:
                at = [row["bytes"] / 1024 for row in mine]
                panel.plot(at, [1e6 * row["value"] for row in mine], label=name, **line_style(index))
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        tidy(panel, f"microseconds of a sum: {form}, {dtype}", "KB on each device")
    legend(figure, list(panels), 3 * len(groups))
    return figure
