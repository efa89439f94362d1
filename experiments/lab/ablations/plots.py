"""Draws the figure of a record of drift: recall along a generation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from experiments.lab.ablations.cluster_drift import CLUSTERS
from experiments.records import COLORS, FAINT, label_lines, legend, new_figure, tidy

_SHARES = {"fixed": ("-", "fixed shares"), "schedule": (":", "shares by ParisKV's schedule")}


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Return the figure of a record: a function by its name, and the name."""
    return {"drift": functools.partial(draw, record)}, ["drift"]


def draw(record: Mapping[str, Any]) -> Any:
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
