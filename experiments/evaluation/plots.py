"""Figures of result folders: needle heatmaps, score against budget and against bytes, methods side by side."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.demo.report import COLORS
from experiments.evaluation.comparison import BASELINE

Row = Mapping[str, Any]


def new_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches that needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _write(panel: Any, grid: np.ndarray) -> None:
    """The numbers on a heatmap."""
    for (i, j), value in np.ndenumerate(grid):
        if not np.isnan(value):
            dark = value < 15 or value > 85
            panel.text(j, i, f"{value:.0f}", ha="center", va="center", fontsize=6.5, color="white" if dark else "black")


def _methods(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _by_place(rows: Sequence[Row]) -> list[Row]:
    """Rows whose methods are named with the place of the question, if there are several places."""
    if len({row["question"] for row in rows}) < 2:
        return list(rows)
    return [{**row, "method": f"{row['method']} ({row['question']})"} for row in rows]


def _mean(rows: Sequence[Row], name: str = "value") -> float:
    return float(np.mean([row[name] for row in rows]))


def needle(rows: Sequence[Row]) -> Any:
    """Depth of the needle against length, a panel a method; red is 0, green 100.

    Raises:
        ValueError: no row has a depth.
    """
    rows = [row for row in rows if row.get("depth") is not None and row["unit"] == "percent"]
    if not rows:
        raise ValueError("a needle heatmap needs rows with depths: run eval with --depths 0,0.25,0.5,0.75,1")
    rows = _by_place(rows)
    methods = _methods(rows)
    lengths, depths = (sorted({row[name] for row in rows}) for name in ("length", "depth"))
    across = min(len(methods), 4)
    down = -(-len(methods) // across)
    figure = new_figure(1.5 + across * max(2.4, 0.55 * len(lengths) + 1.2), 1 + down * max(2.0, 0.3 * len(depths) + 1))
    panels = figure.subplots(down, across, squeeze=False).ravel()
    image = None
    for panel, method in zip(panels, methods, strict=False):
        grid = np.full((len(depths), len(lengths)), np.nan)
        for i, depth in enumerate(depths):
            for j, length in enumerate(lengths):
                mine = [r for r in rows if (r["method"], r["depth"], r["length"]) == (method, depth, length)]
                if mine:
                    grid[i, j] = _mean(mine)
        image = panel.imshow(grid, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
        if len(lengths) <= 12:
            _write(panel, grid)
        panel.set_title(f"{method}: {np.nanmean(grid):.1f}", fontsize=9)
        panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, fontsize=7)
        panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
    for panel in panels[len(methods) :]:
        panel.set_axis_off()
    figure.supxlabel("tokens", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    figure.colorbar(image, ax=list(panels), label="score", shrink=0.8)
    return figure


def _points(rows: Sequence[Row], x: Callable[[Row], float]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(base method, question) -> its labels' points (mean x, mean score over cells), ascending; of Full's tasks or none."""
    made: dict[tuple[str, str], list[tuple[float, float]]] = {}
    names = {row["name"] for row in rows if row["method"] == BASELINE}
    for label, place in dict.fromkeys((row["method"], row["question"]) for row in rows):
        mine = [row for row in rows if (row["method"], row["question"]) == (label, place)]
        if names and {row["name"] for row in mine} != names:  # a mean over other tasks is another number
            continue
        base = label.partition("(")[0]
        point = (float(np.mean([x(row) for row in mine])), _mean(mine))
        made.setdefault((base, place), []).append(point)
    return {key: sorted(points) for key, points in made.items()}


def _curves(rows: Sequence[Row], x: Callable[[Row], float], xlabel: str, frontier: bool, ylabel: str = "score") -> Any:
    rows = [row for row in rows if row["unit"] == "percent"]
    if not rows:
        raise ValueError("a plot of scores needs rows with scores, got none")
    lengths = list(dict.fromkeys(row.get("length") for row in rows))
    one_place = len({row["question"] for row in rows}) == 1
    groups = [[row for row in rows if row.get("length") == length] for length in lengths]
    curves = [_points(here, x) for here in groups]
    order = list(dict.fromkeys(key for points in curves for key in points))  # a method looks alike in every panel
    figure = new_figure(1 + 5.2 * len(lengths), 4.4)
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for panel, length, here, points in zip(panels, lengths, groups, curves, strict=True):
        everything = []
        for (name, place), along in points.items():
            index = order.index((name, place))
            everything += along
            if name == BASELINE:
                panel.axhline(along[0][1], color="#333333", linestyle="--", linewidth=1.2)
                panel.plot(*along[0], marker="*", color="#333333", markersize=10, linestyle="", label=name)
                continue
            panel.plot(
                *zip(*along, strict=True),
                marker="os^"[index // len(COLORS) % 3],
                markersize=4,
                color=COLORS[index % len(COLORS)],
                linestyle=("-", "--")[index // len(COLORS) % 2] if len(along) > 1 else "",
                label=name if one_place else f"{name} ({place})",
            )
        if frontier:
            best = pareto(everything)
            panel.step(*zip(*best, strict=True), where="post", color="#999999", linewidth=1, zorder=0)
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter("{x:g}")
        panel.tick_params(axis="x", which="both", labelsize=8)
        panel.set_ylim(-3, 103)
        panel.set_xlabel(xlabel)
        tasks = len({row["name"] for row in here if row["method"] == BASELINE} or {row["name"] for row in here})
        at = "files" if length is None else f"{length:,} tokens"
        panel.set_title(f"{at}, mean of {tasks} task{'s' * (tasks > 1)}", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    panels[0].set_ylabel(ylabel)
    _legend(figure, panels, 4 * len(lengths))
    return figure


def _legend(figure: Any, panels: Sequence[Any], most: int) -> None:
    """Below the panels, every label of any of them once, at most ``most`` beside each other."""
    found = {label: handle for panel in panels for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    across = min(len(found), most)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=across, frameon=False, fontsize=8)


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point beats in both: less or equal x and a higher score."""
    best: list[tuple[float, float]] = []
    for x, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or score > best[-1][1]:
            best.append((x, score))
    return best


def budget(rows: Sequence[Row]) -> Any:
    """Score against the share of tokens a decode step attends to; Full is the dashed line."""
    return _curves(rows, lambda row: 100 * row["attended_tokens"] / row["length_tokens"], "% of tokens attended", False)


def bytes_read(rows: Sequence[Row]) -> Any:
    """Score against bytes read per decode step, with the Pareto frontier in grey."""
    return _curves(rows, lambda row: row["bytes_read_per_step"] / 1e6, "MB read per decode step", True)


def resident(rows: Sequence[Row]) -> Any:
    """Score against bytes resident per row, with the Pareto frontier in grey."""
    return _curves(rows, lambda row: row["resident_bytes_per_row"] / 1e6, "MB of KV cache resident per row", True)


def tasks(rows: Sequence[Row]) -> Any:
    """Score of every task under every method, a panel a length.

    Raises:
        ValueError: no row has a score.
    """
    rows = [row for row in rows if row["unit"] == "percent"]
    if not rows:
        raise ValueError("a plot of tasks needs rows with scores, got none")
    rows = _by_place(rows)
    methods, names = _methods(rows), list(dict.fromkeys(row["name"] for row in rows))
    lengths = list(dict.fromkeys(row.get("length") for row in rows))
    figure = new_figure(2.5 + 0.62 * len(names) * len(lengths) + 1.2 * len(lengths), 1.4 + 0.34 * len(methods))
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for panel, length in zip(panels, lengths, strict=True):
        grid = np.full((len(methods), len(names)), np.nan)
        for i, method in enumerate(methods):
            for j, name in enumerate(names):
                mine = [r for r in rows if (r["method"], r["name"], r.get("length")) == (method, name, length)]
                if mine:
                    grid[i, j] = _mean(mine)
        image = panel.imshow(grid, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
        _write(panel, grid)
        panel.set_title("files" if length is None else f"{length:,} tokens", fontsize=10)
        panel.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        panel.set_yticks(range(len(methods)), methods, fontsize=8)
    figure.colorbar(image, ax=list(panels), label="score", shrink=0.9)
    return figure


def turns(rows: Sequence[Row]) -> Any:
    """Score against the number of questions asked before, a panel a length: what is lost as a cache is used.

    Raises:
        ValueError: no row has several questions about a context.
    """
    rows = _by_place([row for row in rows if "turn" in row.get("by", {})])
    if not rows:
        raise ValueError("a plot of turns needs several questions about a context: run eval with --questions 8")
    lengths = list(dict.fromkeys(row.get("length") for row in rows))
    figure = new_figure(1 + 4.6 * len(lengths), 3.8)
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for panel, length in zip(panels, lengths, strict=True):
        here = [row for row in rows if row.get("length") == length]
        for index, method in enumerate(_methods(rows)):
            mine = [row["by"]["turn"] for row in here if row["method"] == method]
            asked = sorted({int(turn) for scores in mine for turn in scores})
            means = [float(np.mean([scores[str(turn)] for scores in mine if str(turn) in scores])) for turn in asked]
            full = method.partition(" ")[0] == BASELINE
            style = {"color": "#333333", "linestyle": "--"} if full else {"color": COLORS[index % 7]}
            panel.plot([turn + 1 for turn in asked], means, marker="os^"[index // 7 % 3], ms=4, label=method, **style)
        panel.xaxis.get_major_locator().set_params(integer=True)
        panel.set(xlabel="question", ylim=(-3, 103), title="files" if length is None else f"{length:,} tokens")
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("score")
    _legend(figure, panels, 4)
    return figure


KINDS: dict[str, Callable[[Sequence[Row]], Any]] = {
    "tasks": tasks,
    "budget": budget,
    "pareto": bytes_read,
    "resident": resident,
    "needle": needle,
    "turns": turns,
}


def default_kinds(rows: Sequence[Row]) -> list[str]:
    """The figures that rows can be drawn in."""
    scored = [row for row in rows if row["unit"] == "percent"]
    if not scored:
        return []
    made = ["tasks", "budget", "pareto", "resident"]
    made += ["needle"] * any(row.get("depth") is not None for row in scored)
    return made + ["turns"] * any("turn" in row.get("by", {}) for row in scored)


def save(figure: Any, kind: str) -> bytes:
    """The figure as a file of this kind, "png" or "pdf"."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind)
    return buffer.getvalue()
