"""The figure of an ablation's record: the score of every arm on every task, a panel for each table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.records import heat_map, new_figure, tidy


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """The figures of a record, for ``kvjax plot``: functions by name, and the names of the usual figures."""
    return {"ablation": functools.partial(draw, record)}, ["ablation"]


def draw(record: Mapping[str, Any]) -> Any:
    """Scores in percent: a row for each arm, a column for each task, and the mean over the tasks at the right.

    Args:
        record: the record of an ablation.

    Raises:
        ValueError: the record has no finished cell.
    """
    tables = []
    for table in record["notes"].get("tables", ()):
        cells = {(m["arm"], m["name"]): m["value"] for m in record["metrics"] if m["table"] == table["title"]}
        arms = [arm for arm in table["arms"] if any(arm == known for known, _ in cells)]
        if arms:
            tables.append((table["title"], arms, list(dict.fromkeys(task for _, task in cells)), cells))
    if not tables:
        raise ValueError(f"a figure of {record['experiment']!r} needs finished cells, got none")
    heights = [1.1 + 0.27 * len(arms) for _, arms, _, _ in tables]
    widest = max(len(tasks) for _, _, tasks, _ in tables)
    figure = new_figure(4.5 + 0.75 * widest, sum(heights))
    for panel, (title, arms, tasks, cells) in zip(
        figure.subplots(len(tables), 1, squeeze=False, height_ratios=heights)[:, 0], tables, strict=True
    ):
        grid = np.asarray([[cells.get((arm, task), np.nan) for task in tasks] for arm in arms])
        heat_map(panel, grid)
        tidy(panel, f"{title}: score, %" + " (mean over the tasks at the right)" * (len(tasks) > 1), grid=None)
        panel.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
        panel.set_yticks(range(len(arms)), arms)
        if len(tasks) > 1:
            for row, value in enumerate(np.nanmean(grid, axis=1)):
                panel.text(len(tasks) - 0.4, row, f"{value:.0f}", va="center", fontsize=8)
    return figure
