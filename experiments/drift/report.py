"""The table and the figure of a record of `experiments.drift`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from experiments.drift.settings import CLUSTERS
from experiments.records import COLORS, FAINT, label_lines, legend, new_figure, tidy

_DASHES = {"fixed": "-", "schedule": ":"}
_SHARES = {"fixed": "fixed shares", "schedule": "shares by ParisKV's schedule"}


def table(record: Mapping[str, Any]) -> str:
    """Coarse and final recall with fixed shares, as text."""
    known = {(m["name"], m["clusters"], m["generated"]): m for m in record["metrics"] if m["shares"] == "fixed"}
    kinds = [name for name in CLUSTERS if any(name == clusters for _, clusters, _ in known)]
    lines = ["generated  zone  " + "  ".join(f"{name:>15s}" for name in kinds)]
    for made in sorted({m["generated"] for m in known.values()}):
        values = [[known[f"{stage}_recall", name, made]["value"] for stage in ("coarse", "final")] for name in kinds]
        zone = known["coarse_recall", CLUSTERS[0], made]["zone"]
        lines.append(f"{made:9d}{zone:6d}  " + "  ".join(f"{coarse:7.1f} {final:7.1f}" for coarse, final in values))
    return "\n".join([*lines, "coarse and final recall in percent, fixed shares"])


def _plain(metric: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a metric that can be compared: texts and numbers."""
    return {name: metric[name] for name in ("name", "clusters", "shares")}


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """The figures of a record, for ``kvjax plot``: functions by name, and the names of the usual figures."""
    return {"drift": functools.partial(draw, record)}, ["drift"]


def draw(record: Mapping[str, Any]) -> Any:
    """Recall against the number of generated tokens, a panel for the candidates and a panel for the final keys."""
    settings = record["settings"]
    figure = new_figure(11, 4.2)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, stage, among in zip(panels, ("coarse", "final"), ("candidates", "final"), strict=True):
        ends = []
        for color, name in zip(COLORS, CLUSTERS, strict=False):
            for shares, dashes in _DASHES.items():
                key = {"name": f"{stage}_recall", "clusters": name, "shares": shares}
                points = [(m["generated"], m["value"]) for m in record["metrics"] if key.items() <= _plain(m).items()]
                if not points:  # an older record has fewer kinds
                    continue
                panel.plot(*zip(*points, strict=True), dashes, color=color, linewidth=1.4)
                if shares == "fixed":
                    ends.append((*points[-1], name, color))
        panel.set_ylim(0, 100)
        kept = f"final {settings['k']}" if among == "final" else among
        title = f"top {settings['k']} of q.k among the {kept}, %"
        tidy(panel, title, f"tokens generated after a prompt of {settings['prompt_tokens']:,}")
        label_lines(panel, ends)
    for shares, dashes in _DASHES.items():
        panels[0].plot([], [], dashes, color=FAINT, label=_SHARES[shares])
    legend(figure, [panels[0]])
    figure.suptitle(f"{settings['model']} model, mean over layers and KV heads, a single text", fontsize=11)
    return figure
