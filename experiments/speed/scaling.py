"""A figure of decode steps on one, two, four, ... devices, beside their floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records import COLORS, REFERENCE, label_lines, method_title, new_figure, tidy, token_label

Row = Mapping[str, Any]
Group = tuple[str, int, int, str]  # model, tokens stored, rows, axis of the mesh

_MARKS = "sD^vP*Xo"


def scaling(rows: Sequence[Row], card: str = "") -> Any:
    """Draw milliseconds per token against devices: a panel for each model, length, batch and axis; thin lines are floors.

    A panel has the methods that were timed on several numbers of devices along one axis of a mesh. If there are several
    variants of sums over devices, it shows the fastest.

    Raises:
        ValueError: no method was timed on several numbers of devices.
    """
    groups = scaled(rows)
    if not groups:
        raise ValueError("a figure of devices needs decode rows on meshes of two sizes: run experiments.speed --mesh")
    figure = new_figure(4.6 * len(groups), 4.4)
    if card:
        figure.suptitle(card, fontsize=10)
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
        ticks = [step for step in (1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200) if low <= step <= high]
        panel.set_yticks(ticks, [str(step) for step in ticks], minor=False)
        panel.set_yticks([], minor=True)
        panel.set_xticks(counts, [str(count) for count in counts])
        panel.set_xticks([], minor=True)
        rows_of = "1 row" if batch == 1 else f"{batch} rows"
        tidy(panel, f"{model}, {token_label(length)}, {rows_of} (thin: floor)", f"devices on {axis}", "ms per token")
        label_lines(panel, ends)
    return figure


def scaled(rows: Sequence[Row]) -> dict[Group, dict[str, dict[int, Row]]]:
    """Find the fastest row on each number of devices, by group and method; methods on a single mesh are left out."""
    found: dict[Group, dict[str, dict[int, Row]]] = {}
    done = [row for row in rows if row["name"] == "decode" and row["error"] is None and not row.get("parts")]
    for row in done:
        sizes = [text.split("=") for text in (row.get("mesh") or "").split(",") if text]
        wide = [(axis, int(count)) for axis, count in sizes if count != "1"]
        if len(wide) == 1:
            ((axis, count),) = wide
            _keep(found.setdefault(_group(row, axis), {}).setdefault(row["method"], {}), count, row)
    several = {group: {name: x for name, x in methods.items() if len(x) > 1} for group, methods in found.items()}
    for group, methods in several.items():
        for row in done:
            if not row.get("mesh") and row["method"] in methods and _group(row, group[3]) == group:
                _keep(methods[row["method"]], 1, row)
    return {group: methods for group, methods in several.items() if methods}


def _group(row: Row, axis: str) -> Group:
    return row["model"], row["length"], row["batch"], axis


def _keep(best: dict[int, Row], count: int, row: Row) -> None:
    if count not in best or row["value"] < best[count]["value"]:
        best[count] = row
