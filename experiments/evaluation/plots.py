"""Figures of result folders: needle heat maps, score against budget and against bytes, tasks and methods side by side."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.answering import BASELINES, PAPERS
from experiments.evaluation.comparison import BASELINE, COUNTED, place_of, told_apart
from experiments.evaluation.same_examples import check_alike
from experiments.records import (
    FAINT,
    QUIET,
    REFERENCE,
    Curve,
    amount_axis,
    chosen,
    error_bars,
    heat_map,
    label_lines,
    line_style,
    method_title,
    name_curves,
    new_figure,
    quiet_label,
    tidy,
    token_label,
)
from experiments.tasks import GROUPS

Row = Mapping[str, Any]
_SCORES = range(0, 101, 20)  # ticks of scores
_BEST = 8  # baselines in the figure of the main table
_READINGS = ("centred=", "hierarchy=", "prefilter=")  # knobs of other readings of a paper
_TOP = 104  # upper end of the axis of scores: room for the marks at 0 and 100


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
    """Plot scores by depth of the needle and length, a panel for each method."""
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
        panel.set_title(f"{_asked_title(method)}: {np.nanmean(grid):.1f}", fontsize=9)
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
    points_of: dict[tuple[str, str], list[Point]] = {}
    names = {row["name"] for row in rows if row["method"] == BASELINE}
    for label, question in dict.fromkeys((row["method"], row["question"]) for row in rows):
        mine = [row for row in rows if (row["method"], row["question"]) == (label, question)]
        if names and {row["name"] for row in mine} != names:
            continue
        point = Point(float(np.mean([x(row) for row in mine])), _mean(mine), _ends(mine))
        points_of.setdefault((label.partition("(")[0], question), []).append(point)
    return {key: sorted(points, key=lambda point: (point.x, point.score)) for key, points in points_of.items()}


def curves(quantity: str, rows: Sequence[Row]) -> Any:
    """Plot scores against a quantity, a panel for each length: few methods with colours and names, all others in grey.

    The dashed line is Full, the broad line the Pareto frontier.

    Args:
        quantity: a key of `_QUANTITIES`.
        rows: the metrics.
    """
    x, xlabel, frontier = _QUANTITIES[quantity]
    rows = _scored(rows, quantity)
    lengths = _lengths(rows)
    questions = {row["question"] for row in rows}
    groups = [[row for row in rows if row.get("length") == length] for length in lengths]
    points_of = [_points(here, x) for here in groups]
    order = _in_colour(points_of)
    figure = new_figure(1 + 5.2 * len(lengths), 4.6)
    panels = figure.subplots(1, len(lengths), squeeze=False, sharey=True)[0]
    named: list[tuple[Any, list[Curve], list[tuple[float, float]]]] = []
    quiet: dict[str, None] = {}
    for panel, length, here, points in zip(panels, lengths, groups, points_of, strict=True):
        shown, plain = [], []
        for (name, question), along in points.items():
            label = method_title(name) + (f" ({question})" if len(questions) > 1 else "")
            line = [(point.x, point.score) for point in along]
            if name == BASELINE:
                panel.axhline(along[0].score, color=REFERENCE, linestyle="--", linewidth=1)
            if name != BASELINE and (name, question) not in order:
                quiet[label] = None
                panel.plot(*zip(*line, strict=True), label=label, **QUIET)
                plain += line
                continue
            # A method looks alike in every panel.
            star = {"color": REFERENCE, "marker": "*", "markersize": 9, "linestyle": "--", "linewidth": 1}
            style = star if name == BASELINE else line_style(order.index((name, question)))
            error_bars(panel, [point.x for point in along], [point.ends for point in along], style["color"])
            panel.plot(*zip(*line, strict=True), label=label, **style)
            shown.append(Curve(label, style["color"], line))
        everything = [(point.x, point.score) for along in points.values() for point in along]
        if frontier:
            best = pareto(everything)
            panel.step(*zip(*best, strict=True), where="post", color=FAINT, linewidth=3, alpha=0.35, zorder=0, label=frontier)
        amount_axis(panel, [at for at, _ in everything], axis="x")
        _score_axis(panel)
        tasks_of_full = {row["name"] for row in here if row["method"] == BASELINE} or {row["name"] for row in here}
        over = f", mean of {len(tasks_of_full)} tasks" if len(tasks_of_full) > 1 else f" in {next(iter(tasks_of_full))}"
        tidy(panel, _length_title(length), xlabel, f"score{over}")
        named.append((panel, shown, plain))
    _explain(figure, panels, list(quiet), frontier)
    for panel, shown, plain in named:
        name_curves(panel, shown, plain)
    return figure


def _in_colour(curves: Sequence[Mapping[tuple[str, str], Sequence[Point]]]) -> list[tuple[str, str]]:
    """Choose the methods with a colour: the papers' methods, then the methods of the frontiers, then the best scores."""
    keys = list(dict.fromkeys(key for points in curves for key in points if key[0] != BASELINE))
    papers = [key for name in PAPERS for key in keys if key[0] == name]
    on_it: dict[tuple[str, str], int] = {}
    scores: dict[tuple[str, str], float] = {}
    for points in curves:
        best = set(pareto([(point.x, point.score) for along in points.values() for point in along]))
        for key, along in points.items():
            on_it[key] = on_it.get(key, 0) + sum((point.x, point.score) in best for point in along)
            scores[key] = max([scores.get(key, 0.0), *(point.score for point in along)])
    rest = sorted(keys, key=lambda key: (not on_it[key], -scores[key]))
    return chosen(keys, [*papers, *rest])


def _explain(figure: Any, panels: Sequence[Any], quiet: Sequence[str], frontier: str) -> None:
    """Write below the panels what the frontier is, and which methods are grey."""
    lines = {line.get_label(): line for panel in panels for line in panel.lines}
    entries = {frontier: lines[frontier]} if frontier else {}
    if quiet:
        entries[quiet_label(quiet, 62 * len(panels) + 28)] = lines[quiet[0]]
    if entries:
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=1, frameon=False, fontsize=8)


def pareto(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Select the points (x, score) that no other point beats with less or equal x and a higher score."""
    best: list[tuple[float, float]] = []
    for x, score in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or score > best[-1][1]:
            best.append((x, score))
    return best


# The figures of scores over a quantity: the quantity of a row, what it is, and what the frontier says; "" for none.
_QUANTITIES: dict[str, tuple[Callable[[Row], float], str, str]] = {
    "budget": (lambda row: 100 * row["attended_tokens"] / row["length_tokens"], "% of tokens attended", ""),
    "pareto": (
        lambda row: row["bytes_read_per_step"] / 1e6,
        "MB read per decode step",
        "frontier: no setting reads fewer bytes and scores as high",
    ),
    "resident": (
        lambda row: row["resident_bytes_per_row"] / 1e6,
        "MB of KV cache resident per row",
        "frontier: no setting holds fewer bytes and scores as high",
    ),
}


def tasks(rows: Sequence[Row]) -> Any:
    """Plot the scores of every method in every task, a panel for each length."""
    rows = _by_question(_scored(rows, "tasks"))
    methods, names, lengths = _methods(rows), list(dict.fromkeys(row["name"] for row in rows)), _lengths(rows)
    figure = new_figure(2.5 + 0.62 * len(names) * len(lengths) + 1.2 * len(lengths), 1.4 + 0.34 * len(methods))
    panels = figure.subplots(1, len(lengths), squeeze=False, sharey=True)[0]
    for panel, length in zip(panels, lengths, strict=True):
        cells = [[(method, name, length) for name in names] for method in methods]
        image = heat_map(panel, _grid(rows, cells, lambda row: (row["method"], row["name"], row.get("length"))))
        panel.set_title(_length_title(length), fontsize=10)
        panel.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        panel.set_yticks(range(len(methods)), map(_asked_title, methods), fontsize=8)
    panels[0].set_ylabel("method", fontsize=9)
    figure.supxlabel("task", fontsize=9)
    figure.colorbar(image, ax=list(panels), label="score", shrink=0.9)
    return figure


def memory(rows: Sequence[Row]) -> Any:
    """Plot resident bytes per row against tokens of prompt and answer, a line for each setting of each method.

    A setting has a point for each length: the means over its tasks. A flat line needs no more memory for a longer answer.
    """
    if len({row.get("length") for row in rows}) < 2:
        raise ValueError("a plot of memory needs rows of several lengths: run eval with --lengths 2048,4096")
    settings: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        settings.setdefault(row["method"].partition("(")[0], {}).setdefault(row["method"], []).append(row)
    others = [name for name in settings if name != BASELINE]
    order = chosen(others, [*(name for name in PAPERS if name in others), *others])
    figure = new_figure(6.5, 4.6)
    panel = figure.subplots()
    ends, values = [], []
    for name, mine in settings.items():
        style = QUIET if name != BASELINE else {"color": REFERENCE, "linestyle": "--", "linewidth": 1}
        style = line_style(order.index(name)) if name in order else style
        last = []
        for cells in mine.values():
            at_lengths = [[row for row in cells if row.get("length") == length] for length in _lengths(cells)]
            points = sorted((_mean(at, "length_tokens"), _mean(at, "resident_bytes_per_row") / 1e6) for at in at_lengths)
            panel.plot(*zip(*points, strict=True), **style)
            values += [held for _, held in points]
            last.append(points[-1])
        if style is not QUIET:
            ends.append((*max(last, key=lambda point: point[1]), method_title(name), style["color"]))
    amount_axis(panel, values)
    tidy(panel, "memory of a row", "tokens of prompt and answer", "MB of KV cache resident per row")
    label_lines(panel, ends)
    return figure


def turns(rows: Sequence[Row]) -> Any:
    """Plot the score against the number of the question about a context, a panel for each length.

    The figure shows what is lost while a cache is used.
    """
    rows = _by_question([row for row in rows if "turn" in row.get("by", {})])
    if not rows:
        raise ValueError("a plot of turns needs several questions about a context: run eval with --questions 8")
    lengths, methods = _lengths(rows), _methods(rows)
    means = {method: _mean([row for row in rows if row["method"] == method]) for method in methods}
    others = [method for method in methods if method.partition(" ")[0] != BASELINE]
    papers = [method for method in others if method.partition("(")[0].partition(" ")[0] in PAPERS]
    order = chosen(others, [*papers, *sorted(others, key=lambda method: -means[method])])
    figure = new_figure(1 + 4.6 * len(lengths), 4.2)
    panels = figure.subplots(1, len(lengths), squeeze=False, sharey=True)[0]
    ends: list[list[tuple[float, float, str, str]]] = []
    for panel, length in zip(panels, lengths, strict=True):
        here = [row for row in rows if row.get("length") == length]
        ends.append([])
        for method in methods:
            mine = [row["by"]["turn"] for row in here if row["method"] == method]
            asked = sorted({int(turn) for scores in mine for turn in scores})
            if not asked:
                continue
            scores = [float(np.mean([one[str(turn)] for one in mine if str(turn) in one])) for turn in asked]
            style = {"color": REFERENCE, "linestyle": "--"} if method not in others else QUIET
            if method in order:
                style = line_style(order.index(method))
            line = [(turn + 1, score) for turn, score in zip(asked, scores, strict=True)]
            panel.plot(*zip(*line, strict=True), label=_asked_title(method), **style)
            if style is not QUIET:
                ends[-1].append((*line[-1], _asked_title(method), style["color"]))
        panel.xaxis.get_major_locator().set_params(integer=True)
        _score_axis(panel)
        tidy(panel, _length_title(length), "question about the context", "score")
    _explain(figure, panels, [_asked_title(method) for method in others if method not in order], "")
    for panel, mine in zip(panels, ends, strict=True):
        label_lines(panel, mine)
    return figure


def _asked_title(method: str) -> str:
    """Write a method's name with the place of the question that `_by_question` may have added."""
    name, space, question = method.partition(" (")
    return method_title(name) + space + question


def solved(rows: Sequence[Row]) -> Any:
    """Plot the bytes read, over the tasks that count in the main table, with the papers' methods and the best baselines.

    A task counts at a length if Full scores at least `COUNTED` and its text is no code. A baseline ranks by its best setting.
    Settings that read a paper in another way than the default are left out, so that a line shows budgets alone.
    """
    full = [row for row in rows if row["method"] == BASELINE and row["unit"] == "percent"]
    counted = {(x["name"], x["length"]) for x in full if x["value"] >= COUNTED and x["name"] not in GROUPS["code"]}
    mine = [row for row in rows if (row["name"], row["length"]) in counted]
    mine = [row for row in mine if not any(knob in row["method"] for knob in _READINGS)]
    best = {name: max(point.score for point in along) for (name, _), along in _points(mine, lambda row: 0.0).items()}
    ranked = sorted((name for name in best if name in BASELINES), key=lambda name: -best[name])
    shown = {BASELINE, *PAPERS, *ranked[:_BEST]}
    return curves("pareto", [row for row in mine if row["method"].partition("(")[0] in shown])


KINDS: dict[str, Callable[[Sequence[Row]], Any]] = {
    "tasks": tasks,
    **{quantity: functools.partial(curves, quantity) for quantity in _QUANTITIES},
    "solved": solved,
    "memory": memory,
    "needle": needle,
    "turns": turns,
}


def default_kinds(rows: Sequence[Row]) -> list[str]:
    """Return the names of the figures that show something of these rows."""
    scored = [row for row in rows if row["unit"] == "percent"]
    if not scored:
        return []
    kinds = ["tasks", "budget", "pareto", "resident"]
    kinds += ["needle"] * any(row.get("depth") is not None for row in scored)
    return kinds + ["turns"] * any("turn" in row.get("by", {}) for row in scored)


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Return the figures of a folder's record by name, and the names of the usual figures, for `experiments.cli.plot`."""
    check_alike(record["metrics"])
    rows = told_apart(record["metrics"])
    rows.sort(key=place_of(rows))
    return {name: functools.partial(draw, rows) for name, draw in KINDS.items()}, default_kinds(rows)
