"""Draws the figure of a record: the score of every arm on every task, a panel for each table; recall along a generation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments.lab.ablations.cluster_drift import CLUSTERS
from experiments.records import COLORS, FAINT, heat_map, label_lines, legend, new_figure, tidy

_SHARES = {"fixed": ("-", "fixed shares"), "schedule": (":", "shares by ParisKV's schedule")}


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Return the figures of a record, for ``kvjax plot``: functions by name, and the names of the usual figures."""
    name, draw_it = ("drift", _draw_drift) if record["experiment"] == "drift" else ("ablation", draw)
    return {name: functools.partial(draw_it, record)}, [name]


def draw(record: Mapping[str, Any]) -> Any:
    """Plot scores in percent: a row for each arm, a column for each task, and the mean over the tasks at the right.

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
        about = f"{title}: score, %" + " (mean over the tasks at the right)" * (len(tasks) > 1)
        tidy(panel, about, "task", "setting", grid=None)
        panel.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
        panel.set_yticks(range(len(arms)), arms)
        if len(tasks) > 1:
            for row, value in enumerate(np.nanmean(grid, axis=1)):
                panel.text(len(tasks) - 0.4, row, f"{value:.0f}", va="center", fontsize=8)
    return figure


def _draw_drift(record: Mapping[str, Any]) -> Any:
    """Plot recall against the number of generated tokens, a panel for the candidates and a panel for the final keys."""
    settings = record["settings"]
    figure = new_figure(11, 4.2)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, stage, among in zip(panels, ("coarse", "final"), ("candidates", "final"), strict=True):
        ends = []
        for color, name in zip(COLORS, CLUSTERS, strict=False):
            for shares, (dashes, _) in _SHARES.items():
                key = {"name": f"{stage}_recall", "clusters": name, "shares": shares}
                mine = [m for m in record["metrics"] if all(m[field] == value for field, value in key.items())]
                points = [(m["generated"], m["value"]) for m in mine]
                if not points:  # an older record has fewer kinds
                    continue
                panel.plot(*zip(*points, strict=True), dashes, color=color, linewidth=1.4)
                if shares == "fixed":
                    ends.append((*points[-1], name, color))
        panel.set_ylim(0, 100)
        kept = f"final {settings['k']}" if among == "final" else among
        after = f"tokens generated after a prompt of {settings['prompt_tokens']:,}"
        tidy(panel, f"top {settings['k']} of q.k among the {kept}", after, "recall, %")
        label_lines(panel, ends)
    for dashes, told in _SHARES.values():
        panels[0].plot([], [], dashes, color=FAINT, label=told)
    legend(figure, [panels[0]])
    figure.suptitle(f"{settings['model']} model, mean over layers and KV heads, a single text", fontsize=11)
    return figure
