"""Figures of result folders: scores against bytes, needle heat maps, memory against length, scores by turn."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.answering import BASELINES, PAPERS
from experiments.evaluation.comparison import BASELINE, COUNTED, named, place_of
from experiments.evaluation.reachable import ORACLE, family
from experiments.evaluation.reachable import frontier as reached
from experiments.evaluation.same_examples import check_alike
from experiments.evaluation.understanding import by_kind, paraphrase
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
    method_styles,
    method_title,
    name_curves,
    new_figure,
    quiet_label,
    tidy,
    token_label,
)
from experiments.tasks import GROUPS

Row = Mapping[str, Any]
_BEST = 8  # baselines in the figure of the main table
_READINGS = ("centred=", "hierarchy=", "prefilter=", "kernel=", "chunk=")  # knobs of other readings of a paper
_FOLLOWING = ("capacity", "source")  # no knobs of a sweep: one follows the budget, one names the version of a class
_FULL = {"color": REFERENCE, "linestyle": "--", "linewidth": 1}
_REACHED = {"color": REFERENCE, "linestyle": ":", "linewidth": 1.5, "label": "dotted: the best tokens, known (Oracle)"}
# The quantity of a row against which `curves` draws scores, what it is, and what the frontier says.
_QUANTITIES = {
    "pareto": ("bytes_read_per_step", "MB read per decode step", "no setting reads fewer bytes and scores as high"),
    "resident": (
        "resident_bytes_per_row", "MB of KV cache resident per row", "no setting holds fewer bytes and scores as high",
    ),
}  # fmt: skip


class Point(NamedTuple):
    """A method at a setting: the quantity on the x axis, the mean score over cells (0 to 100), and its 95 % interval."""

    x: float
    score: float
    ends: tuple[float, float]


def _scored(rows: Sequence[Row], figure: str) -> list[Row]:
    scored = [row for row in rows if row["unit"] == "percent"]
    if not scored:
        raise ValueError(f"a plot of {figure} needs rows with scores, got none")
    return scored


def _lengths(rows: Sequence[Row]) -> list[int | None]:
    return list(dict.fromkeys(row.get("length") for row in rows))


def _length_title(length: int | None) -> str:
    return "files" if length is None else f"{token_label(length)} tokens"


def _asked(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """List the rows with their methods' names as in the papers, and the question's place if the rows differ in it."""
    several = len({row["question"] for row in rows}) > 1
    return [(method_title(row["method"]) + f" ({row['question']})" * several, row) for row in rows]


def _mean(rows: Sequence[Row], name: str = "value") -> float:
    return float(np.mean([row[name] for row in rows]))


def _score_axis(panel: Any, least: float = 0) -> None:
    """Scale the axis of scores up to 100, from the multiple of 20 below the ``least``."""
    least = 20 * (int(min(least, 80)) // 20)
    panel.set_ylim(least - (104 - least) / 26, 104)  # room for the marks at both ends
    panel.set_yticks(range(least, 101, 20 if least < 60 else 10))


def needle(rows: Sequence[Row]) -> Any:
    """Plot scores by depth of the needle and length, a panel for each method."""
    rows = [row for row in rows if row.get("depth") is not None and row["unit"] == "percent"]
    if not rows:
        raise ValueError("a needle heatmap needs rows with depths: run eval with --depths 0,0.25,0.5,0.75,1")
    scores: dict[str, dict[tuple, list[float]]] = {}
    for name, row in _asked(rows):
        scores.setdefault(name, {}).setdefault((row["depth"], row["length"]), []).append(row["value"])
    lengths, depths = (sorted({row[name] for row in rows}) for name in ("length", "depth"))
    across = min(len(scores), 4)
    down = -(-len(scores) // across)
    figure = new_figure(1.5 + across * max(2.4, 0.55 * len(lengths) + 1.2), 1 + down * max(2.0, 0.3 * len(depths) + 1))
    panels = figure.subplots(down, across, squeeze=False).ravel()
    image = None
    for panel, (name, cells) in zip(panels, scores.items(), strict=False):
        grid = np.asarray([[np.mean(cells.get((depth, length), np.nan)) for length in lengths] for depth in depths])
        image = heat_map(panel, grid, numbers=len(lengths) <= 12)
        panel.set_title(f"{name}: {np.nanmean(grid):.1f}", fontsize=9)
        panel.set_xticks(range(len(lengths)), [token_label(length) for length in lengths], fontsize=7)
        panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=7)
    for panel in panels[len(scores) :]:
        panel.set_axis_off()
    figure.supxlabel("tokens", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    figure.colorbar(image, ax=list(panels), label="score", shrink=0.8)
    return figure


def sweep(rows: Sequence[Row]) -> Any:
    """Plot mean scores of a sweep of two knobs as heat maps: a panel for each method, place of the question and length."""
    sweeps = _swept(_scored(rows, "sweeps"))
    if not sweeps:
        raise ValueError(
            "a heat map of a sweep needs a method of which two knobs vary: run eval with --grid KNOB=V1,V2 --grid OTHER=V1,V2"
        )
    several = len({(row["method"].partition("(")[0], row["question"]) for mine, _ in sweeps for row in mine}) > 1
    across = min(len(sweeps), 3)
    down, image = -(-len(sweeps) // across), None
    figure = new_figure(1.2 + 4.2 * across, 0.6 + 3.2 * down)
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for panel, (mine, varied) in zip(panels, sweeps, strict=False):
        (first, x), (second, y) = varied.items()
        cells = [[[row for row in mine if (row["knobs"][first], row["knobs"][second]) == (a, b)] for a in x] for b in y]
        image = heat_map(panel, np.asarray([[_mean(here) if here else np.nan for here in line] for line in cells]))
        about = f"{method_title(mine[0]['method'].partition('(')[0])} ({mine[0]['question']}), " * several
        tidy(panel, about + _length_title(mine[0].get("length")), first, second, grid=None)
        panel.set_xticks(range(len(x)), [f"{value}" for value in x])
        panel.set_yticks(range(len(y)), [f"{value}" for value in y])
    for panel in panels[len(sweeps) :]:
        panel.set_axis_off()
    names = {row["name"] for mine, _ in sweeps for row in mine}
    figure.colorbar(image, ax=list(panels), label=f"score, mean of {len(names)} tasks" if len(names) > 1 else "score")
    return figure


def _swept(rows: Sequence[Row]) -> list[tuple[list[Row], dict[str, list[Any]]]]:
    """Find the methods of which just two knobs vary at a length, in all combinations: their rows, and the values of both."""
    groups: dict[tuple, list[Row]] = {}
    for row in (row for row in rows if "(" in row["method"]):  # a label has the knobs that were set
        groups.setdefault((row["method"].partition("(")[0], row["question"], row.get("length")), []).append(row)
    found = []
    for mine in groups.values():
        values: dict[str, set] = {}
        for row in mine:
            for knob, value in (row.get("knobs") or {}).items():
                if knob not in _FOLLOWING and isinstance(value, (int, float, str)):
                    values.setdefault(knob, set()).add(value)
        varied = {
            knob: sorted(x, key=lambda value: (isinstance(value, str), value)) for knob, x in values.items() if len(x) > 1
        }
        pairs = {tuple(row["knobs"][knob] for knob in varied) for row in mine} if len(varied) == 2 else set()
        if pairs and len(pairs) == np.prod([len(values) for values in varied.values()]):
            found.append((mine, varied))
    return found


def _points(rows: Sequence[Row], quantity: str) -> dict[tuple[str, str], list[Point]]:
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
        # Cells are independent, so the variances of their means add.
        halves = [(row["interval_95"][1] - row["interval_95"][0]) / 2 for row in mine]
        score, half = _mean(mine), float(np.sqrt(np.sum(np.square(halves)))) / len(mine)
        point = Point(_mean(mine, quantity) / 1e6, score, (max(score - half, 0.0), min(score + half, 100.0)))
        points_of.setdefault((family(label), question), []).append(point)
    return {key: sorted(points) for key, points in points_of.items()}


def curves(kind: str, rows: Sequence[Row]) -> Any:
    """Plot scores against a quantity, a panel for each length: few methods with colours and names, all others in grey.

    The dashed line is Full, the broad line the Pareto frontier.

    Args:
        kind: a key of `_QUANTITIES`.
        rows: the metrics.
    """
    quantity, xlabel, frontier = _QUANTITIES[kind]
    rows, frontier = _scored(rows, kind), f"frontier: {frontier}"
    lengths, several = _lengths(rows), len({row["question"] for row in rows}) > 1
    groups = [[row for row in rows if row.get("length") == length] for length in lengths]
    points_of = [_points(here, quantity) for here in groups]
    order = _in_colour(points_of)
    styles = dict(zip(order, method_styles([name for name, _ in order]), strict=True))
    least = min(point.ends[0] for points in points_of for along in points.values() for point in along)
    figure, panels = _panels(lengths)
    named: list[tuple[list[Curve], list[tuple[float, float]]]] = []
    for panel, length, here, points in zip(panels, lengths, groups, points_of, strict=True):
        shown, plain = [], []
        for (name, question), along in list(points.items()):
            if name == ORACLE:
                full = points.get((BASELINE, question), [])
                known = reached([(name, x.x, x.score) for x in along] + [(BASELINE, x.x, x.score) for x in full])
                panel.plot(*zip(*known, strict=True), **_REACHED)
                del points[name, question]
                continue
            label = method_title(name) + f" ({question})" * several
            line = [(point.x, point.score) for point in along]
            if name == BASELINE:
                panel.axhline(along[0].score, **_FULL)
                style = {**_FULL, "marker": "*", "markersize": 9}
            elif (name, question) in styles:
                style = styles[name, question]
            else:
                panel.plot(*zip(*line, strict=True), label=label, **QUIET)
                plain += line
                continue
            error_bars(panel, [point.x for point in along], [point.ends for point in along], style["color"])
            panel.plot(*zip(*line, strict=True), label=label, **style)
            shown.append(Curve(label, style["color"], line))
        everything = [(point.x, point.score) for along in points.values() for point in along]
        broad = {"color": FAINT, "linewidth": 3, "alpha": 0.35, "zorder": 0}
        panel.step(*zip(*pareto(everything), strict=True), where="post", label=frontier, **broad)
        amount_axis(panel, [at for at, _ in everything], axis="x")
        _score_axis(panel, least)
        tasks = {row["name"] for row in here if row["method"] == BASELINE} or {row["name"] for row in here}
        over = f", mean of {len(tasks)} tasks" if len(tasks) > 1 else f" in {next(iter(tasks))}"
        tidy(panel, _length_title(length), xlabel, f"score{over}")
        named.append((shown, plain))
    _explain(figure, panels, frontier)
    for panel, (shown, plain) in zip(panels, named, strict=True):
        name_curves(panel, shown, plain)
    return figure


def _panels(lengths: Sequence[int | None]) -> tuple[Any, Sequence[Any]]:
    """Make a figure with a panel for each length."""
    figure = new_figure(1 + 5.2 * len(lengths), 4.6)
    return figure, figure.subplots(1, len(lengths), squeeze=False, sharey=True)[0]


def _in_colour(panels: Sequence[Mapping[tuple[str, str], Sequence[Point]]]) -> list[tuple[str, str]]:
    """Choose the methods with a colour: the papers' methods, then the methods of the frontiers, then the best scores."""
    keys = list(dict.fromkeys(key for points in panels for key in points if key[0] not in (BASELINE, ORACLE)))
    on_it: dict[tuple[str, str], int] = {}
    scores: dict[tuple[str, str], float] = {}
    for points in panels:
        best = set(pareto([point[:2] for key, along in points.items() if key[0] != ORACLE for point in along]))
        for key, along in points.items():
            on_it[key] = on_it.get(key, 0) + sum(point[:2] in best for point in along)
            scores[key] = max([scores.get(key, 0.0), *(point.score for point in along)])
    rest = sorted(keys, key=lambda key: (not on_it[key], -scores[key]))
    return chosen(keys, [*(key for name in PAPERS for key in keys if key[0] == name), *rest])


def _explain(figure: Any, panels: Sequence[Any], frontier: str = "") -> None:
    """Write below the panels what the frontier is, and which methods are grey."""
    lines = {line.get_label(): line for panel in panels for line in panel.lines}
    quiet = [label for label, line in lines.items() if line.get_color() == QUIET["color"]]
    entries = {name: lines[name] for name in (frontier, _REACHED["label"]) if name in lines}
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
    styles = dict(zip(order, method_styles(order), strict=True))
    figure = new_figure(6.5, 4.6)
    panel = figure.subplots()
    ends, values = [], []
    for name, mine in settings.items():
        style = _FULL if name == BASELINE else styles.get(name, QUIET)
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
    rows = [row for row in rows if "turn" in row.get("by", {})]
    if not rows:
        raise ValueError("a plot of turns needs several questions about a context: run eval with --questions 8")
    lengths, groups = _lengths(rows), {}
    for name, row in _asked(rows):
        groups.setdefault(name, []).append(row)
    others = [name for name, mine in groups.items() if mine[0]["method"] != BASELINE]
    papers = [name for name in others if groups[name][0]["method"].partition("(")[0] in PAPERS]
    order = chosen(others, [*papers, *sorted(others, key=lambda name: -_mean(groups[name]))])
    styles = dict(zip(order, method_styles([groups[name][0]["method"] for name in order]), strict=True))
    figure, panels = _panels(lengths)
    ends: list[list[tuple[float, float, str, str]]] = []
    for panel, length in zip(panels, lengths, strict=True):
        ends.append([])
        for name, mine in groups.items():
            here = [row["by"]["turn"] for row in mine if row.get("length") == length]
            asked = sorted({int(turn) for scores in here for turn in scores})
            line = [(1 + turn, float(np.mean([one[str(turn)] for one in here if str(turn) in one]))) for turn in asked]
            style = _FULL if name not in others else styles.get(name, QUIET)
            panel.plot(*zip(*line, strict=True), label=name, **style)
            if line and style is not QUIET:
                ends[-1].append((*line[-1], name, style["color"]))
        panel.xaxis.get_major_locator().set_params(integer=True)
        _score_axis(panel)
        tidy(panel, _length_title(length), "question about the context", "score")
    _explain(figure, panels)
    for panel, mine in zip(panels, ends, strict=True):
        label_lines(panel, mine)
    return figure


def solved(rows: Sequence[Row]) -> Any:
    """Plot the bytes read, over the tasks that count in the main table, with the papers' methods and the best baselines.

    A task counts at a length if Full scores at least `COUNTED` and its text is no code. A baseline ranks by its best setting.
    Settings that read a paper in another way than the default are left out, so that a line shows budgets alone.
    """
    full = [row for row in rows if row["method"] == BASELINE and row["unit"] == "percent"]
    counted = {(x["name"], x["length"]) for x in full if x["value"] >= COUNTED and x["name"] not in GROUPS["code"]}
    mine = [row for row in rows if (row["name"], row["length"]) in counted]
    mine = [row for row in mine if not any(knob in row["method"] for knob in _READINGS)]
    points = _points(mine, "bytes_read_per_step")
    ranked = (key for key in points if key[0] in BASELINES and key[0] != ORACLE)
    best = {key[0]: max(point.score for point in points[key]) for key in ranked}
    shown = {BASELINE, ORACLE, *PAPERS, *sorted(best, key=lambda name: -best[name])[:_BEST]}
    return curves("pareto", [row for row in mine if row["method"].partition("(")[0] in shown])


KINDS: dict[str, Callable[[Sequence[Row]], Any]] = {
    **{kind: functools.partial(curves, kind) for kind in _QUANTITIES},
    "solved": solved,
    "memory": memory,
    "needle": needle,
    "sweep": sweep,
    "turns": turns,
    "paraphrase": paraphrase,
}


def default_kinds(rows: Sequence[Row]) -> list[str]:
    """Return the names of the figures that show something of these rows."""
    scored = [row for row in rows if row["unit"] == "percent"]
    kinds = [*_QUANTITIES] * bool(scored) + ["sweep"] * bool(_swept(scored))
    kinds += ["needle"] * any(row.get("depth") is not None for row in scored)
    kinds += ["paraphrase"] * any({"literal", "paraphrased"} <= means.keys() for means in by_kind(scored).values())
    return kinds + ["turns"] * any("turn" in row.get("by", {}) for row in scored)


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Return the figures of a folder's record by name, and the names of the usual figures, for `experiments.cli.plot`."""
    check_alike(record["metrics"])
    rows = list(map(named, record["metrics"]))
    rows.sort(key=place_of(rows))
    return {name: functools.partial(draw, rows) for name, draw in KINDS.items()}, default_kinds(rows)
