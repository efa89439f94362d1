"""Figures of result folders: needle heat maps, score against budget and against bytes, tasks and methods side by side."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.answering import BASELINES, PAPERS
from experiments.evaluation.comparison import BASELINE, place_of, told_apart
from experiments.evaluation.order import COUNTED
from experiments.records import (
    FAINT,
    REFERENCE,
    amount_axis,
    error_bars,
    heat_map,
    label_lines,
    line_style,
    new_figure,
    text_color,
    tidy,
    token_label,
)
from experiments.tasks import GROUPS

Row = Mapping[str, Any]
_SCORES = range(0, 101, 20)  # ticks of scores
_BEST = 8  # baselines in the figure of the main table
_TOP = 104  # upper end of the axis of scores: room for the marks at 0 and 100
_LETTER, _LINE = 0.016, 0.042  # size of a letter of a name as shares of a panel's width and height


@dataclasses.dataclass(frozen=True)
class Point:
    """A method at a setting: means over the cells.

    Attributes:
        x: the quantity on the x axis.
        score: 0 to 100.
        ends: the 95 % interval of the score.
    """

    x: float
    score: float
    ends: tuple[float, float]


def _scored(rows: Sequence[Row], figure: str) -> list[Row]:
    scored = [row for row in rows if row["unit"] == "percent"]
    if not scored:
        raise ValueError(f"a plot of {figure} needs rows with scores, got none")
    return scored


def _methods(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def _lengths(rows: Sequence[Row]) -> list[int | None]:
    return list(dict.fromkeys(row.get("length") for row in rows))


def _length_title(length: int | None) -> str:
    return "files" if length is None else f"{token_label(length)} tokens"


def _by_question(rows: Sequence[Row]) -> list[Row]:
    """Add the question's place to the methods' names, if the rows differ in it."""
    if len({row["question"] for row in rows}) < 2:
        return list(rows)
    return [{**row, "method": f"{row['method']} ({row['question']})"} for row in rows]


def _mean(rows: Sequence[Row], name: str = "value") -> float:
    return float(np.mean([row[name] for row in rows]))


def _ends(rows: Sequence[Row]) -> tuple[float, float]:
    """Compute the 95 % interval of the mean over cells; cells are independent, so the variances of their means add."""
    score = _mean(rows)
    half = [(row["interval_95"][1] - row["interval_95"][0]) / 2 for row in rows]
    half_of_mean = float(np.sqrt(np.sum(np.square(half)))) / len(rows)
    return max(score - half_of_mean, 0.0), min(score + half_of_mean, 100.0)


def _score_axis(panel: Any) -> None:
    panel.set_ylim(-4, _TOP)
    panel.set_yticks(_SCORES)


def needle(rows: Sequence[Row]) -> Any:
    """Plot scores by depth of the needle and length, a panel for each method.

    Raises:
        ValueError: no row has a depth.
    """
    rows = [row for row in rows if row.get("depth") is not None and row["unit"] == "percent"]
    if not rows:
        raise ValueError("a needle heatmap needs rows with depths: run eval with --depths 0,0.25,0.5,0.75,1")
    rows = _by_question(rows)
    methods = _methods(rows)
    lengths, depths = (sorted({row[name] for row in rows}) for name in ("length", "depth"))
    across = min(len(methods), 4)
    down = -(-len(methods) // across)
    figure = new_figure(1.5 + across * max(2.4, 0.55 * len(lengths) + 1.2), 1 + down * max(2.0, 0.3 * len(depths) + 1))
    panels = figure.subplots(down, across, squeeze=False).ravel()
    image = None
    for panel, method in zip(panels, methods, strict=False):
        cells = [[(method, depth, length) for length in lengths] for depth in depths]
        grid = _grid(rows, cells, lambda row: (row["method"], row["depth"], row["length"]))
        image = heat_map(panel, grid, numbers=len(lengths) <= 12)
        panel.set_title(f"{method}: {np.nanmean(grid):.1f}", fontsize=9)
        panel.set_xticks(range(len(lengths)), [token_label(length) for length in lengths], fontsize=7)
        panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
    for panel in panels[len(methods) :]:
        panel.set_axis_off()
    figure.supxlabel("tokens", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    figure.colorbar(image, ax=list(panels), label="score", shrink=0.8)
    return figure


def _grid(rows: Sequence[Row], cells: Sequence[Sequence[tuple]], key: Callable[[Row], tuple]) -> np.ndarray:
    """Average the scores of the rows with each cell's key: float [rows, columns], NaN without such a row."""
    grouped: dict[tuple, list[Row]] = {}
    for row in rows:
        grouped.setdefault(key(row), []).append(row)
    return np.asarray([[_mean(grouped[cell]) if cell in grouped else np.nan for cell in line] for line in cells])


def _points(rows: Sequence[Row], x: Callable[[Row], float]) -> dict[tuple[str, str], list[Point]]:
    """Collect the points of a method's settings, ascending, by (base method, question).

    A point is the mean over the tasks that Full ran. Methods that ran other tasks are left out, because means over different
    tasks cannot be compared.
    """
    made: dict[tuple[str, str], list[Point]] = {}
    names = {row["name"] for row in rows if row["method"] == BASELINE}
    for label, question in dict.fromkeys((row["method"], row["question"]) for row in rows):
        mine = [row for row in rows if (row["method"], row["question"]) == (label, question)]
        if names and {row["name"] for row in mine} != names:
            continue
        point = Point(float(np.mean([x(row) for row in mine])), _mean(mine), _ends(mine))
        made.setdefault((label.partition("(")[0], question), []).append(point)
    return {key: sorted(points, key=lambda point: (point.x, point.score)) for key, points in made.items()}


def _curves(rows: Sequence[Row], x: Callable[[Row], float], xlabel: str, figure_of: str, frontier: bool) -> Any:
    rows = _scored(rows, figure_of)
    lengths = _lengths(rows)
    questions = {row["question"] for row in rows}
    groups = [[row for row in rows if row.get("length") == length] for length in lengths]
    curves = [_points(here, x) for here in groups]
    order = list(dict.fromkeys(key for points in curves for key in points if key[0] != BASELINE))
    figure = new_figure(1 + 5.2 * len(lengths), max(4.2, 1.2 + 0.2 * len(order)))
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for panel, length, here, points in zip(panels, lengths, groups, curves, strict=True):
        ends = []
        for (name, question), along in points.items():
            label = name if len(questions) == 1 else f"{name} ({question})"
            full = name == BASELINE
            # A method looks alike in every panel.
            style = {"color": REFERENCE, "marker": "*", "markersize": 9}
            if not full:
                style = line_style(order.index((name, question)))
            error_bars(panel, [point.x for point in along], [point.ends for point in along], style["color"])
            panel.plot([point.x for point in along], [point.score for point in along], label=label, **style)
            if full:
                panel.axhline(along[0].score, color=REFERENCE, linestyle="--", linewidth=1)
            ends.append((along[-1].x, along[-1].score, label, style["color"]))
        everything = [(point.x, point.score) for along in points.values() for point in along]
        if frontier:
            panel.step(*zip(*pareto(everything), strict=True), where="post", color=FAINT, linewidth=1, zorder=0)
        amount_axis(panel, [at for at, _ in everything], axis="x")
        _score_axis(panel)
        tasks_of_full = {row["name"] for row in here if row["method"] == BASELINE} or {row["name"] for row in here}
        count = len(tasks_of_full)
        over = f"mean of {count} tasks" if count > 1 else f"{next(iter(tasks_of_full))}"
        tidy(panel, f"score at {_length_title(length)}, {over}", xlabel)
        _label_points(panel, ends, everything)
    return figure


def _label_points(
    panel: Any, ends: Sequence[tuple[float, float, str, str]], points: Sequence[tuple[float, float]]
) -> None:
    """Write a name at the right of each point, or near it where the name would cover another name or a point.

    Args:
        panel: axes of matplotlib with their final limits.
        ends: (x, y, name, colour) of the points to name.
        points: (x, y) of all points.
    """
    to_share = panel.transData + panel.transAxes.inverted()
    marks = [tuple(map(float, to_share.transform(point))) for point in points]
    taken = [(x - 0.01, x + 0.01, y) for x, y in marks]  # (left, right, middle) as shares of the panel
    for x, y, name, color in sorted(ends, key=lambda end: -end[1]):
        at_x, at_y = map(float, to_share.transform((x, y)))
        left, right = at_x + 0.02, at_x + 0.02 + _LETTER * len(name)
        others = [box for box in taken if box[0] < right and left < box[1]]
        shifts = sorted((_LINE * step / 2 for step in range(-16, 17)), key=abs)
        free = (shift for shift in shifts if all(abs(at_y + shift - middle) >= _LINE for _, _, middle in others))
        shift = next(free, 0.0)
        taken.append((left, right, at_y + shift))
        panel.annotate(
            name,
            xy=(x, y),
            xytext=(left, at_y + shift),
            textcoords="axes fraction",
            va="center",
            fontsize=8,
            color=text_color(color),
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},  # lines end at a name instead of crossing it
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2} if shift else None,
            annotation_clip=False,
        )


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Select the points (x, score) that no other point beats with less or equal x and a higher score."""
    best: list[tuple[float, float]] = []
    for x, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or score > best[-1][1]:
            best.append((x, score))
    return best


def budget(rows: Sequence[Row]) -> Any:
    """Plot the score against the share of tokens that a decode step attends to; the dashed line is Full."""
    xlabel = "% of tokens attended"
    return _curves(rows, lambda row: 100 * row["attended_tokens"] / row["length_tokens"], xlabel, "budgets", False)


def bytes_read(rows: Sequence[Row]) -> Any:
    """Plot the score against bytes read per decode step; the grey line is the Pareto frontier."""
    return _curves(rows, lambda row: row["bytes_read_per_step"] / 1e6, "MB read per decode step", "bytes", True)


def resident(rows: Sequence[Row]) -> Any:
    """Plot the score against resident bytes per row; the grey line is the Pareto frontier."""
    xlabel = "MB of KV cache resident per row"
    return _curves(rows, lambda row: row["resident_bytes_per_row"] / 1e6, xlabel, "bytes", True)


def tasks(rows: Sequence[Row]) -> Any:
    """Plot the scores of every method in every task, a panel for each length.

    Raises:
        ValueError: no row has a score.
    """
    rows = _by_question(_scored(rows, "tasks"))
    methods, names, lengths = _methods(rows), list(dict.fromkeys(row["name"] for row in rows)), _lengths(rows)
    figure = new_figure(2.5 + 0.62 * len(names) * len(lengths) + 1.2 * len(lengths), 1.4 + 0.34 * len(methods))
    panels = figure.subplots(1, len(lengths), squeeze=False, sharey=True)[0]
    for panel, length in zip(panels, lengths, strict=True):
        cells = [[(method, name, length) for name in names] for method in methods]
        image = heat_map(panel, _grid(rows, cells, lambda row: (row["method"], row["name"], row.get("length"))))
        panel.set_title(_length_title(length), fontsize=10)
        panel.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        panel.set_yticks(range(len(methods)), methods, fontsize=8)
    figure.colorbar(image, ax=list(panels), label="score", shrink=0.9)
    return figure


def turns(rows: Sequence[Row]) -> Any:
    """Plot the score against the number of the question about a context, a panel for each length.

    The figure shows what is lost while a cache is used.

    Raises:
        ValueError: no row has several questions about a context.
    """
    rows = _by_question([row for row in rows if "turn" in row.get("by", {})])
    if not rows:
        raise ValueError("a plot of turns needs several questions about a context: run eval with --questions 8")
    lengths, methods = _lengths(rows), _methods(rows)
    others = [method for method in methods if method.partition(" ")[0] != BASELINE]
    figure = new_figure(1 + 4.6 * len(lengths), max(3.8, 1.2 + 0.2 * len(methods)))
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for panel, length in zip(panels, lengths, strict=True):
        here = [row for row in rows if row.get("length") == length]
        ends = []
        for method in methods:
            mine = [row["by"]["turn"] for row in here if row["method"] == method]
            asked = sorted({int(turn) for scores in mine for turn in scores})
            if not asked:
                continue
            means = [float(np.mean([scores[str(turn)] for scores in mine if str(turn) in scores])) for turn in asked]
            style = line_style(others.index(method)) if method in others else {"color": REFERENCE, "linestyle": "--"}
            panel.plot([turn + 1 for turn in asked], means, label=method, **style)
            ends.append((asked[-1] + 1, means[-1], method, style["color"]))
        panel.xaxis.get_major_locator().set_params(integer=True)
        _score_axis(panel)
        tidy(panel, f"score at {_length_title(length)}", "question about the context")
        label_lines(panel, ends)
    return figure


def solved(rows: Sequence[Row]) -> Any:
    """Plot as `bytes_read`, over the tasks that count in the main table, with the papers' methods and the best baselines.

    A task counts at a length if Full scores at least `COUNTED`, and if its text is no code. A baseline ranks by its best
    setting.

    Raises:
        ValueError: no task counts.
    """
    full = [row for row in rows if row["method"] == BASELINE and row["unit"] == "percent"]
    counted = {(x["name"], x["length"]) for x in full if x["value"] >= COUNTED and x["name"] not in GROUPS["code"]}
    mine = [row for row in rows if (row["name"], row["length"]) in counted]
    best = {name: max(point.score for point in along) for (name, _), along in _points(mine, lambda row: 0.0).items()}
    ranked = sorted((name for name in best if name in BASELINES), key=lambda name: -best[name])
    shown = {BASELINE, *PAPERS, *ranked[:_BEST]}
    return bytes_read([row for row in mine if row["method"].partition("(")[0] in shown])


KINDS: dict[str, Callable[[Sequence[Row]], Any]] = {
    "tasks": tasks,
    "budget": budget,
    "pareto": bytes_read,
    "solved": solved,
    "resident": resident,
    "needle": needle,
    "turns": turns,
}


def default_kinds(rows: Sequence[Row]) -> list[str]:
    """Return the names of the figures that show something of these rows."""
    scored = [row for row in rows if row["unit"] == "percent"]
    if not scored:
        return []
    made = ["tasks", "budget", "pareto", "resident"]
    made += ["needle"] * any(row.get("depth") is not None for row in scored)
    return made + ["turns"] * any("turn" in row.get("by", {}) for row in scored)


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Return the figures of a folder's record by name, and the names of the usual figures, for `experiments.cli.plot`."""
    rows = told_apart(record["metrics"])
    rows.sort(key=place_of(rows))
    return {name: functools.partial(draw, rows) for name, draw in KINDS.items()}, default_kinds(rows)
