"""Figures of a speed record: time and memory against length, bars of time over their floors, a step's parts, many devices."""

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
from experiments.speed.rows import Row

Styles = Mapping[str, dict[str, Any]]
Group = tuple[str, int, int, str]  # model, tokens stored, rows, axis of the mesh

_PARTS = {"rest": "rest", "attend": "attend", "select": "select", "select_and_attend": "select and attend"}
_PART_COLORS = dict(zip(_PARTS.values(), (COLORS[5], COLORS[0], COLORS[4], COLORS[2]), strict=True))
_BAR = 0.27  # inches of height for each bar
_SHARES = {  # of the layers in host memory: by a line's dashes what it shows, and which shares these are
    "-": ("all layers in host memory", lambda share: share == 1),
    "--": ("some layers in host memory", lambda share: 0 < share < 1),
    ":": ("resident", lambda share: share == 0),
}
_MARKS = "sD^vP*Xo"
_TICKS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200)  # milliseconds


def overview(rows: Sequence[Row], card: str = "") -> Any:
    """Draw a row of panels for each model: time against length, time beside its floor, throughput against rows.

    The fastest method is the first bar, and the title names the ``card`` that was measured.
    Lengths are drawn at the smallest batch; bars and throughputs at the length that has most rows. The first and the last
    panel show the methods that were measured at several lengths or batches. They are left out if there are no such methods.
    """
    decoded = _good(rows)
    styles = _styles(row["method"] for row in decoded)
    by_model = {name: [row for row in decoded if row["model"] == name] for name in dict.fromkeys(x["model"] for x in decoded)}
    panels = {name: _panels(mine, rows) for name, mine in by_model.items()}
    most = max(map(len, panels.values()), default=1)
    bars = max((len({row["method"] for row in mine}) for mine in by_model.values()), default=1)
    longest = max(map(len, styles), default=0)
    count = max(len(panels), 1)
    figure = new_figure(4.9 * most + 0.08 * max(longest - 16, 0), max(3.8, 1.5 + _BAR * bars) * count)
    _name_card(figure, card)
    grid = figure.subplots(count, most, squeeze=False)
    for axes, (model, drawn) in zip(grid, panels.items(), strict=False):  # of prompts alone there are no panels
        for panel, draw in zip(axes, drawn, strict=False):
            draw(panel, by_model[model], styles)
            if len(panels) > 1:
                panel.set_title(f"{model}: {panel.get_title()}")
    for axes, drawn in zip(grid, panels.values() or [()], strict=True):
        for panel in axes[len(drawn) :]:
            panel.set_axis_off()
    return figure


def _panels(rows: Sequence[Row], every: Sequence[Row]) -> list[Callable[..., None]]:
    """List the panels of the overview that have something to show for the rows of one model."""
    length = _usual_length(rows)
    lacking = [x for x in every if x.get("out_of_memory") and (x["model"], x["length"]) == (rows[0]["model"], length)]
    has_lengths = _several([row for row in rows if row["batch"] == _least(rows)], "length")
    has_batches = _several([row for row in rows if row["length"] == length], "batch")
    by_batch = functools.partial(_by_batch, lacking=[row for row in lacking if row["name"] == "decode"])
    return [_by_length] * bool(has_lengths) + [_floors] + [by_batch] * bool(has_batches)


def _by_length(panel: Any, rows: Sequence[Row], styles: Styles) -> None:
    least = _least(rows)
    shown = _several([row for row in rows if row["batch"] == least], "length")
    _draw_times(panel, _lines(shown), styles)
    tidy(panel, f"{_rows_of(least)} (thin: floor)", "tokens stored", "ms per token")


def _floors(panel: Any, rows: Sequence[Row], styles: Styles) -> None:
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


def _by_batch(panel: Any, rows: Sequence[Row], styles: Styles, lacking: Sequence[Row]) -> None:
    """Draw throughput against rows; a cross at the smallest batch that lacks memory, level with the largest that fits."""
    length = _usual_length(rows)
    shown = _several([row for row in rows if row["length"] == length], "batch")
    ends, crosses = [], []
    for name in dict.fromkeys(row["method"] for row in shown):
        points = sorted((row["batch"], row["tokens_per_second"]) for row in shown if row["method"] == name)
        panel.plot(*zip(*points, strict=True), **styles[name])
        ends.append((*points[-1], name, styles[name]["color"]))
        batch, speed = points[-1]
        over = [row["batch"] for row in lacking if method_title(row["method"]) == name and row["batch"] > batch]
        if over:
            crosses.append((batch, min(over), speed, styles[name]["color"]))
    for at, (batch, over, speed, color) in enumerate(crosses):
        panel.plot([batch, over], [speed, speed], ":", color=color, linewidth=1)
        panel.plot(over, speed, "x", color=color, label=None if at else "out of memory")
    if crosses:
        panel.legend(loc="upper left", fontsize=8, frameon=False)
    panel.set(xlim=(0, None), ylim=(0, None))
    tidy(panel, f"{token_label(length)} tokens", "rows decoded together", "tokens per second")
    label_lines(panel, ends)


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
    """Draw the decode rows of the smallest batch, a line for each method and model."""
    good = _good(rows)
    if not good:
        raise ValueError("a figure of decoding needs decode rows, got none: run experiments.speed")
    least = _least(good)
    shown = [row for row in good if row["batch"] == least]
    lines = _lines(shown)
    figure = new_figure(7, max(4.2, 0.24 * len(lines) + 1))
    panel = figure.subplots()
    draw(panel, lines, _styles(lines))
    tidy(panel, "; ".join(filter(None, (_rows_of(least), title))), "tokens stored", ylabel)
    _name_card(figure, card)
    return figure


def _draw_times(panel: Any, lines: Mapping[str, Sequence[Row]], styles: Styles) -> None:
    """Draw milliseconds per token, their spread and their floors, on logarithmic axes."""
    amount_axis(panel, [1e3 * row[field] for mine in lines.values() for row in mine for field in ("least", "most", "floor")])
    for name, mine in lines.items():
        lengths, color = [row["length"] for row in mine], styles[name]["color"]
        error_bars(panel, lengths, [(1e3 * row["least"], 1e3 * row["most"]) for row in mine], color)
        panel.plot(lengths, [1e3 * row["floor"] for row in mine], linewidth=0.7, color=color, alpha=0.6)
    _draw_lines(panel, lines, styles, "value", 1e3)


def _draw_memory(panel: Any, lines: Mapping[str, Sequence[Row]], styles: Styles) -> None:
    amount_axis(panel, [row["cache_bytes"] / 1e9 for mine in lines.values() for row in mine])
    _draw_lines(panel, lines, styles, "cache_bytes", 1e-9)


def _draw_lines(panel: Any, lines: Mapping[str, Sequence[Row]], styles: Styles, field: str, scale: float) -> None:
    """Draw a field against length, with the name at each line's end; the limits of the y axis are already set."""
    ends = []
    for name, mine in lines.items():
        panel.plot([row["length"] for row in mine], [scale * row[field] for row in mine], **styles[name])
        ends.append((mine[-1]["length"], scale * mine[-1][field], name, styles[name]["color"]))
    token_axis(panel, [row["length"] for mine in lines.values() for row in mine])
    label_lines(panel, ends)


def split(rows: Sequence[Row], card: str = "") -> Any:
    """Draw the time of a step in its parts: attention over the selected tokens, selection, and the rest of the model.

    In some methods, selection and attention cannot be told apart; they are drawn as one part.

    Raises:
        ValueError: no row has its time split.
    """
    rows = [row for row in _good(rows) if row.get("split")]
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
    rows = [{**row, "method": method_title(row["method"])} for row in rows if row["batch"] == least]
    lines = _lines(rows)
    figure = new_figure(7, 4.2)
    panel = figure.subplots()
    ends: dict[str, tuple[float, float, str, str]] = {}
    for name, style in _styles(lines).items():
        for dashes, (_, has) in _SHARES.items():
            mine = [row for row in lines[name] if has(row["share"])]
            if not mine:
                continue
            lengths, times = [row["length"] for row in mine], [1e3 * row["value"] for row in mine]
            panel.plot(lengths, times, **{**style, "linestyle": dashes})
            error_bars(panel, lengths, [(1e3 * r["least"], 1e3 * r["most"]) for r in mine], style["color"])
            ends.setdefault(name, (lengths[-1], times[-1], name, style["color"]))
    for dashes, (label, has) in _SHARES.items():
        if any(has(row["share"]) for row in rows):
            panel.plot([], [], dashes, color=FAINT, label=label)
    if rows:
        token_axis(panel, [row["length"] for row in rows])
    panel.set_ylim(0, None)
    tidy(panel, f"decoding from host memory, {_rows_of(least)}", "tokens stored", "ms per token")
    _name_card(figure, card)
    label_lines(panel, list(ends.values()))
    legend(figure, [panel])
    return figure


def scaling(rows: Sequence[Row], card: str = "") -> Any:
    """Draw milliseconds per token against devices: a panel for each model, length, batch and axis; thin lines are floors.

    A panel has the methods that were timed on several numbers of devices along one axis of a mesh. If there are several
    variants of sums over devices, it shows the fastest.

    Raises:
        ValueError: no method was timed on several numbers of devices.
    """
    groups = _on_several(rows)
    if not groups:
        raise ValueError("a figure of devices needs decode rows on meshes of two sizes: run experiments.speed --mesh")
    figure = new_figure(4.6 * len(groups), 4.4)
    _name_card(figure, card)
    names = sorted({name for methods in groups.values() for name in methods} - {"full"})  # a method looks alike in all panels
    looks = {"full": (REFERENCE, "o")} | {x: (COLORS[i % len(COLORS)], _MARKS[i % len(_MARKS)]) for i, x in enumerate(names)}
    for panel, ((model, length, batch, axis), methods) in zip(
        figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True
    ):
        ends, counts = [], sorted({count for best in methods.values() for count in best})
        panel.set(xscale="log", yscale="log", xlim=(counts[0] * 0.93, counts[-1] * 1.07))
        for name, best in methods.items():
            color, mark = looks[name]
            at = sorted(best)
            times, floors = ([1e3 * best[count][field] for count in at] for field in ("value", "floor"))
            panel.plot(at, times, color=color, marker=mark)
            panel.plot(at, floors, color=color, linewidth=0.7, alpha=0.6)
            ends.append((at[-1], times[-1], method_title(name), color))
        low, high = panel.get_ylim()
        ticks = [step for step in _TICKS if low <= step <= high]
        panel.set_yticks(ticks, [str(step) for step in ticks], minor=False)
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.set_yticks([], minor=True)
        panel.set_xticks([], minor=True)
        tidy(panel, f"{model}, {token_label(length)}, {_rows_of(batch)} (thin: floor)", f"devices on {axis}", "ms per token")
        label_lines(panel, ends)
    return figure


def _on_several(rows: Sequence[Row]) -> dict[Group, dict[str, dict[int, Row]]]:
    """Find the fastest row on each number of devices, by group and method; methods on a single mesh are left out."""
    groups: dict[Group, dict[str, dict[int, Row]]] = {}
    done = [row for row in rows if row["name"] == "decode" and row["error"] is None and not row.get("parts")]
    done.sort(key=lambda row: row["value"])
    for row in done:
        sizes = [text.split("=") for text in (row.get("mesh") or "").split(",") if text]
        wide = [(axis, int(count)) for axis, count in sizes if count != "1"]
        if len(wide) == 1:
            ((axis, count),) = wide
            groups.setdefault(_group(row, axis), {}).setdefault(row["method"], {}).setdefault(count, row)
    several = {group: {name: x for name, x in methods.items() if len(x) > 1} for group, methods in groups.items()}
    for group, methods in several.items():
        for row in done:
            if not row.get("mesh") and row["method"] in methods and _group(row, group[3]) == group:
                methods[row["method"]].setdefault(1, row)
    return {group: methods for group, methods in several.items() if methods}


def _group(row: Row, axis: str) -> Group:
    return row["model"], row["length"], row["batch"], axis


def _good(rows: Sequence[Row]) -> list[Row]:
    """Select decode rows without failures; the method's name says where and how it ran, unless it ran on one device."""
    good = [row for row in rows if row["name"] == "decode" and row["error"] is None]
    return [{**row, "method": ", ".join([method_title(row["method"]), *_where(row)])} for row in good]


def _where(row: Row) -> list[str]:
    """Name the axes of the mesh, or the part of a model that ran alone, and the variant of sums; [] on one device."""
    mesh = [axis for axis in (row.get("mesh") or "").split(",") if axis and not axis.endswith("=1")]
    part = f"one of {row['parts']} parts" if row.get("parts") else ""
    return [*mesh, *(text for text in (part, row.get("sums")) if text)]


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


def _lines(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows of one model by their method, and of several models by method and model, in order of length."""
    several = len({row["model"] for row in rows}) > 1
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(row["method"] + (f", {row['model']}" if several else ""), []).append(row)
    return {name: sorted(mine, key=lambda row: row["length"]) for name, mine in lines.items()}


def _styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Choose a line style for each name; Full is dark, so that other methods are compared with it."""
    known = list(dict.fromkeys(names))
    full = [name for name in known if name.partition(",")[0] == "Full"]
    styles = {name: {**line_style(turn * 7), "color": REFERENCE} for turn, name in enumerate(full)}
    return styles | {name: line_style(index) for index, name in enumerate(name for name in known if name not in full)}


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
    good = _good(rows)
    usual = ["speed"] * bool(good)
    usual += ["tpot", "memory"] * bool(_several(good, "length"))  # points at a single length make no curve
    usual += ["split"] * any(row.get("split") for row in good)
    usual += ["scaling"] * bool(_on_several(rows))
    return {name: functools.partial(draw, rows, card) for name, draw in kinds.items()}, usual
