"""Figures of a speed record: bars of time over their floors, and time against the number of devices."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import records
from experiments.speed.rows import Row

Group = tuple[str, int, int, str]  # model, tokens stored, rows, axis of the mesh

_BAR = 0.27  # inches of height for each bar
_TICKS = (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200)  # milliseconds


def beside_floors(rows: Sequence[Row], card: str = "") -> Any:
    """Draw the time of a step beside its floor: a panel of bars for each model, the fastest method first.

    A panel shows the length that has most rows, at the smallest batch. The title names the ``card`` that was measured.
    """
    decoded = _good(rows)
    by_model = {
        name: _shown([x for x in decoded if x["model"] == name]) for name in dict.fromkeys(x["model"] for x in decoded)
    }
    bars = max(map(len, by_model.values()), default=1)
    figure = records.new_figure(6.5, max(3.8, 1.5 + _BAR * bars) * max(len(by_model), 1))
    _name_card(figure, card)
    for at, (model, shown) in enumerate(by_model.items(), 1):
        _bars(figure.add_subplot(len(by_model), 1, at), shown, f"{model}: " if len(by_model) > 1 else "")
    return figure


def _shown(rows: Sequence[Row]) -> list[Row]:
    """Select the rows of a panel, the fastest first; of several runs of a method the first counts."""
    lengths = [row["length"] for row in rows]
    length = max(sorted(set(lengths)), key=lengths.count)
    batch = min(row["batch"] for row in rows if row["length"] == length)
    here = [row for row in reversed(rows) if (row["length"], row["batch"]) == (length, batch)]
    return sorted({row["method"]: row for row in here}.values(), key=lambda row: row["value"])


def _bars(panel: Any, shown: Sequence[Row], begin: str) -> None:
    least = [1e3 * row["floor"] for row in shown]
    above = [1e3 * max(row["value"] - row["floor"], 0) for row in shown]
    parts = {"floor: reading its bytes": least, "above the floor": above}
    records.bar_chart(panel, [row["method"] for row in shown], parts, (records.COLORS[0], records.COLORS[5]))
    for index, row in enumerate(shown):
        panel.hlines(index, 1e3 * row["least"], 1e3 * row["most"], color=records.REFERENCE, linewidth=1.2)
        text = f" {1e3 * row['value']:.2f} ({100 / row['ratio']:.0f} %)"
        panel.text(1e3 * row["most"], index, text, va="center", fontsize=7.5)
    panel.set_xlim(right=1.28 * max(1e3 * row["most"] for row in shown))
    about = f"{begin}{records.token_label(shown[0]['length'])} tokens, {_rows_of(shown[0]['batch'])}, the fastest first"
    records.tidy(panel, about, "ms per token (% of the roofline)", grid="x")
    panel.set_ylim(len(shown) - 0.4, -1.6)  # room for the legend above the shortest bar
    panel.legend(loc="upper right", fontsize=8, frameon=True, framealpha=0.9, edgecolor="none")


def _name_card(figure: Any, card: str) -> None:
    if card:
        figure.suptitle(card, fontsize=10)


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
    figure = records.new_figure(4.6 * len(groups), 4.4)
    _name_card(figure, card)
    names = sorted({name for methods in groups.values() for name in methods} - {"full"})  # a method looks alike in all panels
    looks = {"full": (records.REFERENCE, "o")}
    looks |= {
        name: (style["color"], style["marker"]) for name, style in zip(names, records.method_styles(names), strict=True)
    }
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
            ends.append((at[-1], times[-1], records.method_title(name), color))
        low, high = panel.get_ylim()
        ticks = [step for step in _TICKS if low <= step <= high]
        panel.set_yticks(ticks, [str(step) for step in ticks], minor=False)
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.set_yticks([], minor=True)
        panel.set_xticks([], minor=True)
        records.tidy(
            panel,
            f"{model}, {records.token_label(length)}, {_rows_of(batch)} (thin: floor)",
            f"devices on {axis}",
            "ms per token",
        )
        records.label_lines(panel, ends)
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
    return [{**row, "method": ", ".join([records.method_title(row["method"]), *_where(row)])} for row in good]


def _where(row: Row) -> list[str]:
    """Name the axes of the mesh, or the part of a model that ran alone, and the variant of sums; [] on one device."""
    mesh = [axis for axis in (row.get("mesh") or "").split(",") if axis and not axis.endswith("=1")]
    part = f"one of {row['parts']} parts" if row.get("parts") else ""
    return [*mesh, *(text for text in (part, row.get("sums")) if text)]


def _rows_of(batch: int) -> str:
    return "1 row" if batch == 1 else f"{batch} rows"


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """List the figures of a record of `experiments.speed`, for ``kvjax plot``.

    Returns:
        Functions by name that draw a figure, and the names of the figures that the record's rows suffice for.
    """
    rows, card = record["metrics"], " and ".join(records.device_kinds(record))
    usual = ["speed"] * bool(_good(rows)) + ["scaling"] * bool(_on_several(rows))
    kinds = {"speed": beside_floors, "scaling": scaling}
    return {name: functools.partial(draw, rows, card) for name, draw in kinds.items()}, usual
