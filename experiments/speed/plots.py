"""Figures of a speed record: time and memory against length, bars of time over their floors, and the parts of a step.

`scaling` has the figure of several devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from experiments.records import (
    COLORS,
    FAINT,
    REFERENCE,
    amount_axis,
    bar_chart,
    device_kinds,
    error_bars,
    label_lines,
    legend,
    line_style,
    method_title,
    new_figure,
    tidy,
    token_axis,
    token_label,
)
from experiments.speed.scaling import scaled, scaling

Row = Mapping[str, Any]

_PARTS = {"rest": "rest", "attend": "attend", "select": "select", "select_and_attend": "select and attend"}
_PART_COLORS = dict(zip(_PARTS.values(), (COLORS[5], COLORS[0], COLORS[4], COLORS[2]), strict=True))
_BAR = 0.27  # inches of height for each bar


def overview(rows: Sequence[Row], card: str = "") -> Any:
    """Draw a row of panels for each model: time against length, time beside its floor, throughput against rows.

    The fastest method is the first bar, and the title names the ``card`` that was measured.
    Lengths are drawn at the smallest batch; bars and throughputs at the length that has most rows. The first and the last
    panel show the methods that were measured at several lengths or batches. They are left out if there are no such methods.
    """
    decoded = _good(rows)
    models = list(dict.fromkeys(row["model"] for row in decoded))
    styles = _styles(row["method"] for row in decoded)
    panels = [_panels([row for row in decoded if row["model"] == model]) for model in models]
    most = max((len(names) for names in panels), default=1)
    bars = max((len({row["method"] for row in decoded if row["model"] == model}) for model in models), default=1)
    longest = max((len(name) for name in styles), default=0)
    figure = new_figure(4.9 * most + 0.08 * max(longest - 16, 0), max(3.8, 1.5 + _BAR * bars) * max(len(models), 1))
    _name_card(figure, card)
    grid = figure.subplots(max(len(models), 1), most, squeeze=False)
    for axes, names, model in zip(grid, panels, models, strict=False):  # of prompts alone there are no panels
        mine = [row for row in decoded if row["model"] == model]
        for panel, name in zip(axes, names, strict=False):
            if name == "batch":
                lacking = [row for row in rows if row["model"] == model and row.get("out_of_memory")]
                _by_batch(panel, mine, lacking, styles)
            else:
                _OVERVIEW[name](panel, mine, styles)
            if len(models) > 1:
                panel.set_title(f"{model}: {panel.get_title()}")
    for axes, names in zip(grid, panels or [[]], strict=True):
        for panel in axes[len(names) :]:
            panel.set_axis_off()
    return figure


def _panels(rows: Sequence[Row]) -> list[str]:
    """List the panels of the overview that have something to show for the rows of one model."""
    least, most = _least(rows), _usual_length(rows)
    has_lengths = _several([row for row in rows if row["batch"] == least], "length")
    has_batches = _several([row for row in rows if row["length"] == most], "batch")
    return ["length"] * bool(has_lengths) + ["floor"] + ["batch"] * bool(has_batches)


def _by_length(panel: Any, rows: Sequence[Row], styles: Mapping[str, dict]) -> None:
    least = _least(rows)
    shown = _several([row for row in rows if row["batch"] == least], "length")
    _draw_times(panel, shown, styles, lambda row: row["method"])
    tidy(panel, f"{_rows_of(least)} (thin: floor)", "tokens stored", "ms per token")


def _floors(panel: Any, rows: Sequence[Row], styles: Mapping[str, dict]) -> None:
    length = _usual_length(rows)
    least = _least([row for row in rows if row["length"] == length])
    here = [row for row in reversed(rows) if (row["length"], row["batch"]) == (length, least)]
    shown = sorted({row["method"]: row for row in here}.values(), key=lambda row: row["value"])  # of several runs the first
    floors = [1e3 * row["floor"] for row in shown]
    above = [1e3 * max(row["value"] - row["floor"], 0) for row in shown]
    parts = {"floor: reading its bytes": floors, "above the floor": above}
    bar_chart(panel, [row["method"] for row in shown], parts, (COLORS[0], COLORS[5]))
    for index, row in enumerate(shown):
        panel.hlines(index, 1e3 * row["least"], 1e3 * row["most"], color=REFERENCE, linewidth=1.2)
        text = f" {1e3 * row['value']:.2f} ({100 / row['ratio']:.0f} %)"
        panel.text(1e3 * row["most"], index, text, va="center", fontsize=7.5)
    panel.set_xlim(right=1.28 * max(1e3 * row["most"] for row in shown))
    about = f"{token_label(length)} tokens, {_rows_of(least)}, the fastest first"
    tidy(panel, about, "ms per token (% of the roofline)", grid="x")
    panel.set_ylim(len(shown) - 0.4, -1.6)  # room for the legend above the shortest bar
    panel.legend(loc="upper right", fontsize=8, frameon=True, framealpha=0.9, edgecolor="none")


def _by_batch(panel: Any, rows: Sequence[Row], lacking: Sequence[Row], styles: Mapping[str, dict]) -> None:
    length = _usual_length(rows)
    shown = _several([row for row in rows if row["length"] == length], "batch")
    ends = []
    for name in dict.fromkeys(row["method"] for row in shown):
        points = sorted((row["batch"], row["tokens_per_second"]) for row in shown if row["method"] == name)
        panel.plot(*zip(*points, strict=True), **styles[name])
        ends.append((*points[-1], name, styles[name]["color"]))
    _draw_limits(panel, rows, lacking, styles)
    panel.set(xlim=(0, None), ylim=(0, None))
    tidy(panel, f"{token_label(length)} tokens", "rows decoded together", "tokens per second")
    label_lines(panel, ends)


def _draw_limits(panel: Any, rows: Sequence[Row], lacking: Sequence[Row], styles: Mapping[str, dict]) -> None:
    """Draw a cross at the smallest batch that does not fit into memory, level with the largest batch that fits."""
    length = _usual_length(rows)
    shown = _several([row for row in rows if row["length"] == length], "batch")
    crossed = False
    for name in dict.fromkeys(row["method"] for row in shown):
        batch, speed = max((row["batch"], row["tokens_per_second"]) for row in shown if row["method"] == name)
        tried = [row for row in lacking if (row["name"], row["length"]) == ("decode", length)]
        tried = [row for row in tried if method_title(row["method"]) == name]
        over = [row["batch"] for row in tried if row["batch"] > batch]
        if over:
            panel.plot([batch, min(over)], [speed, speed], ":", color=styles[name]["color"], linewidth=1)
            panel.plot(min(over), speed, "x", color=styles[name]["color"], label=None if crossed else "out of memory")
            crossed = True
    if crossed:
        panel.legend(loc="upper left", fontsize=8, frameon=False)


_OVERVIEW = {"length": _by_length, "floor": _floors}


def tpot(rows: Sequence[Row], card: str = "") -> Any:
    """Draw milliseconds per token against length; thin lines are the floors that the bytes set."""
    return _against_length(rows, card, "thin: floor, bars: least to most", "ms per token", _draw_times)


def memory(rows: Sequence[Row], card: str = "") -> Any:
    """Draw the gigabytes that the cache allocates against length."""
    return _against_length(rows, card, "", "GB of KV cache and metadata", _draw_memory)


def _name_card(figure: Any, card: str) -> None:
    if card:
        figure.suptitle(card, fontsize=10)


def _against_length(rows: Sequence[Row], card: str, title: str, ylabel: str, draw: Callable[..., None]) -> Any:
    rows = _decoded(rows)
    single = len({row["model"] for row in rows}) == 1
    name = (lambda row: row["method"]) if single else (lambda row: f"{row['method']}, {row['model']}")
    names = {name(row) for row in rows}
    figure = new_figure(7, max(4.2, 0.24 * len(names) + 1))
    panel = figure.subplots()
    draw(panel, rows, _styles(map(name, rows)), name)
    tidy(panel, "; ".join(filter(None, (_rows_of(_least(rows)), title))), "tokens stored", ylabel)
    _name_card(figure, card)
    return figure


def _draw_times(panel: Any, rows: Sequence[Row], styles: Mapping[str, dict], name: Callable[[Row], str]) -> None:
    """Draw milliseconds per token, their spread and their floors, on logarithmic axes."""
    amount_axis(panel, [1e3 * row[field] for row in rows for field in ("least", "most", "floor")])
    for label, mine in _grouped(rows, name).items():
        lengths, color = [row["length"] for row in mine], styles[label]["color"]
        error_bars(panel, lengths, [(1e3 * row["least"], 1e3 * row["most"]) for row in mine], color)
        panel.plot(lengths, [1e3 * row["floor"] for row in mine], linewidth=0.7, color=color, alpha=0.6)
    _draw_lines(panel, rows, styles, name, lambda row: 1e3 * row["value"])


def _draw_memory(panel: Any, rows: Sequence[Row], styles: Mapping[str, dict], name: Callable[[Row], str]) -> None:
    amount_axis(panel, [row["cache_bytes"] / 1e9 for row in rows])
    _draw_lines(panel, rows, styles, name, lambda row: row["cache_bytes"] / 1e9)


def _draw_lines(
    panel: Any,
    rows: Sequence[Row],
    styles: Mapping[str, dict],
    name: Callable[[Row], str],
    read: Callable[[Row], float],
) -> None:
    """Draw a line for each name against length, with the name at its end; the limits of the y axis are already set."""
    ends = []
    for label, mine in _grouped(rows, name).items():
        panel.plot([row["length"] for row in mine], [read(row) for row in mine], **styles[label])
        ends.append((mine[-1]["length"], read(mine[-1]), label, styles[label]["color"]))
    token_axis(panel, [row["length"] for row in rows])
    label_lines(panel, ends)


def split(rows: Sequence[Row], card: str = "") -> Any:
    """Draw the time of a step in its parts: attention over the selected tokens, selection, and the rest of the model.

    In some methods, selection and attention cannot be told apart; they are drawn as one part.

    Raises:
        ValueError: no row has its time split.
    """
    rows = [row for row in _good(rows) if row.get("split") and "select" in row["split"]]
    if not rows:
        raise ValueError("a time split needs rows with one: run experiments.speed without --no-split")
    rows.sort(key=lambda row: (row["batch"], row["value"]))
    many, several = (len({row[field] for row in rows}) > 1 for field in ("batch", "model"))
    names = [
        f"{row['method']}, {token_label(row['length'])}"
        + f", {_rows_of(row['batch'])}" * many
        + f", {row['model']}" * several
        for row in rows
    ]
    parts = {label: [1e3 * _part(row["split"], part) for row in rows] for part, label in _PARTS.items()}
    figure = new_figure(7.5, 1.4 + _BAR * len(rows))
    panel = figure.subplots()
    drawn = {label: sizes for label, sizes in parts.items() if any(sizes)}
    bar_chart(panel, names, drawn, [_PART_COLORS[label] for label in drawn])
    tidy(panel, card, "ms per token", grid="x")
    legend(figure, [panel])
    return figure


def _part(times: Mapping[str, float | None], part: str) -> float:
    """Return the seconds of a part; the sum of selection and attention counts only if they are not told apart."""
    if part == "select_and_attend" and times["attend"] is not None:
        return 0.0
    return max(times[part] or 0.0, 0.0)  # a difference of two measurements may be below zero


def offload(rows: Sequence[Row], card: str = "") -> Any:
    """Draw milliseconds per token against length at the smallest batch: all, some or no layers in host memory."""
    rows = [row for row in rows if row["error"] is None and row["name"] != "prefill"]
    least = _least(rows)
    rows = [row for row in rows if row["batch"] == least]
    models = {row["model"] for row in rows}
    names = {id(row): ", ".join([method_title(row["method"]), *[row["model"]] * (len(models) > 1)]) for row in rows}
    styles = _styles(names.values())
    figure = new_figure(7, 4.2)
    panel = figure.subplots()
    ends: dict[str, tuple[float, float, str, str]] = {}
    for name, style in styles.items():
        own = [row for row in rows if names[id(row)] == name]
        for dashes, has in (("-", _all_hosted), ("--", _part_hosted), (":", _resident)):
            mine = sorted((row for row in own if has(row["share"])), key=lambda row: row["length"])
            if not mine:
                continue
            lengths, times = [row["length"] for row in mine], [1e3 * row["value"] for row in mine]
            panel.plot(lengths, times, **{**style, "linestyle": dashes})
            error_bars(panel, lengths, [(1e3 * r["least"], 1e3 * r["most"]) for r in mine], style["color"])
            ends.setdefault(name, (lengths[-1], times[-1], name, style["color"]))
    shares = [row["share"] for row in rows]
    for dashes, label, has in (
        ("-", "all layers in host memory", _all_hosted),
        ("--", "some layers in host memory", _part_hosted),
        (":", "resident", _resident),
    ):
        if any(map(has, shares)):
            panel.plot([], [], dashes, color=FAINT, label=label)
    if rows:
        token_axis(panel, [row["length"] for row in rows])
    panel.set_ylim(0, None)
    tidy(panel, f"decoding from host memory, {_rows_of(least)}", "tokens stored", "ms per token")
    _name_card(figure, card)
    label_lines(panel, list(ends.values()))
    legend(figure, [panel])
    return figure


def _all_hosted(share: float) -> bool:
    return share == 1


def _part_hosted(share: float) -> bool:
    return 0 < share < 1


def _resident(share: float) -> bool:
    return share == 0


def _good(rows: Sequence[Row]) -> list[Row]:
    """Select decode rows without failures; the method's name says where and how it ran, unless it ran on one device."""
    good = [row for row in rows if row["name"] == "decode" and row["error"] is None]
    return [{**row, "method": ", ".join([method_title(row["method"]), *_where(row)])} for row in good]


def _where(row: Row) -> list[str]:
    """Name the axes of the mesh, or the part of a model that ran alone, and the variant of sums; [] on one device."""
    mesh = [axis for axis in (row.get("mesh") or "").split(",") if axis and not axis.endswith("=1")]
    part = f"one of {row['parts']} parts" if row.get("parts") else ""
    return [*mesh, *(text for text in (part, row.get("sums")) if text)]


def _decoded(rows: Sequence[Row]) -> list[Row]:
    """Select the decode rows of the smallest batch measured, without failures."""
    good = _good(rows)
    if not good:
        raise ValueError("a figure of decoding needs decode rows, got none: run experiments.speed")
    least = _least(good)
    return [row for row in good if row["batch"] == least]


def _least(rows: Sequence[Row]) -> int:
    """Return the smallest batch."""
    return min((row["batch"] for row in rows), default=1)


def _usual_length(rows: Sequence[Row]) -> int:
    """Return the length that has most rows; of several such lengths, the shortest."""
    lengths = [row["length"] for row in rows]
    return max(sorted(set(lengths)), key=lengths.count, default=0)


def _several(rows: Sequence[Row], field: str) -> list[Row]:
    """Select the rows of the methods that have several values of a field."""
    values = {name: {row[field] for row in rows if row["method"] == name} for name in {row["method"] for row in rows}}
    return [row for row in rows if len(values[row["method"]]) > 1]


def _grouped(rows: Sequence[Row], name: Callable[[Row], str]) -> dict[str, list[Row]]:
    """Group the rows by name, in order of length."""
    made: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["length"]):
        made.setdefault(name(row), []).append(row)
    return made


def _styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Choose a line style for each name; Full is dark, so that other methods are compared with it."""
    known = list(dict.fromkeys(names))
    full = [name for name in known if name.partition(",")[0] == "Full"]
    others = [name for name in known if name not in full]
    made = {name: {**line_style(turn * 7), "color": REFERENCE} for turn, name in enumerate(full)}
    return made | {name: line_style(index) for index, name in enumerate(others)}


def _rows_of(batch: int) -> str:
    return "1 row" if batch == 1 else f"{batch} rows"


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """List the figures of a record of `experiments.speed` or `experiments.speed.offload`, for ``kvjax plot``.

    Returns:
        Functions by name that draw a figure, and the names of the figures that the record's rows suffice for.
    """
    rows, card = record["metrics"], " and ".join(device_kinds(record))
    if record["experiment"] == "offload":
        return {"offload": functools.partial(offload, rows, card)}, ["offload"]
    kinds = {"speed": overview, "tpot": tpot, "memory": memory, "split": split, "scaling": scaling}
    usual = ["speed"] * bool(_good(rows))
    usual += ["tpot", "memory"] * bool(_several(_good(rows), "length"))  # points at a single length make no curve
    usual += ["split"] * any("select" in (row.get("split") or {}) for row in _good(rows))
    usual += ["scaling"] * bool(scaled(rows))
    return {name: functools.partial(draw, rows, card) for name, draw in kinds.items()}, usual
