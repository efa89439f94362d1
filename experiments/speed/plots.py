"""Figures of a speed record: time and memory against length, where a step's time goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.demo.report import COLORS
from experiments.evaluation.plots import new_figure

Row = Mapping[str, Any]


def _decoded(rows: Sequence[Row]) -> list[Row]:
    """Decode rows of the smallest batch measured, without failures."""
    good = [row for row in rows if row["name"] == "decode" and row["error"] is None]
    if not good:
        raise ValueError("a figure of decoding needs decode rows, got none: run experiments.speed")
    least = min(row["batch"] for row in good)
    return [row for row in good if row["batch"] == least]


def _against_length(rows: Sequence[Row], read: Callable[[Row], float], ylabel: str, floor: str | None) -> Any:
    rows = _decoded(rows)
    one_model = len({row["model"] for row in rows}) == 1
    figure = new_figure(7, 4.4)
    panel = figure.subplots()
    for index, (model, method) in enumerate(dict.fromkeys((row["model"], row["method"]) for row in rows)):
        mine = sorted((r for r in rows if (r["model"], r["method"]) == (model, method)), key=lambda r: r["length"])
        turn = index // len(COLORS) % 3
        style = {"color": COLORS[index % len(COLORS)], "linestyle": ("-", "--", ":")[turn]}
        lengths = [row["length"] for row in mine]
        label = method if one_model else f"{method}, {model}"
        panel.plot(lengths, [read(row) for row in mine], marker="os^"[turn], markersize=4, label=label, **style)
        if floor and all(floor in row for row in mine):
            panel.plot(lengths, [1e3 * row[floor] for row in mine], linewidth=0.7, color=style["color"], alpha=0.6)
    lengths = sorted({row["length"] for row in rows})
    panel.set(xscale="log", yscale="log", xlabel="tokens stored", ylabel=ylabel)
    panel.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=8)
    panel.xaxis.minorticks_off()
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("{x:g}")
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def tpot(rows: Sequence[Row]) -> Any:
    """Milliseconds per token against length; thin lines are the floors that the bytes set."""
    return _against_length(rows, lambda row: 1e3 * row["value"], "ms per token (thin: floor)", "floor")


def memory(rows: Sequence[Row]) -> Any:
    """Bytes that the cache allocates against length."""
    return _against_length(rows, lambda row: row["cache_bytes"] / 1e9, "GB of KV cache and metadata", None)


def split(rows: Sequence[Row]) -> Any:
    """Where a step's time goes: attention over what was selected, selection, and the rest of the model.

    Some methods' selection cannot be told from their attention.

    Raises:
        ValueError: no row has its time split.
    """
    rows = [row for row in _decoded(rows) if row.get("split") and "select" in row["split"]]
    if not rows:
        raise ValueError("a time split needs rows with one: run experiments.speed without --no-split")
    figure = new_figure(7.5, 1.4 + 0.36 * len(rows))
    panel = figure.subplots()
    begun = [0.0] * len(rows)
    for index, (part, label) in enumerate(_PARTS.items()):
        sizes = [1e3 * _part(row["split"], part) for row in rows]
        if any(sizes):
            panel.barh(range(len(rows)), sizes, left=begun, color=COLORS[index], label=label)
        begun = [left + size for left, size in zip(begun, sizes, strict=True)]
    models = len({row["model"] for row in rows}) > 1
    labels = [f"{row['method']}, {row['length']:,}" + (f", {row['model']}" if models else "") for row in rows]
    panel.set_yticks(range(len(rows)), labels, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel("ms per token")
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


_PARTS = {"rest": "rest", "attend": "attend", "select": "select", "select_and_attend": "select and attend"}


def _part(times: Mapping[str, float | None], part: str) -> float:
    """Seconds; of the last part only where it is not told apart."""
    if part == "select_and_attend" and times["attend"] is not None:
        return 0.0
    return max(times[part] or 0.0, 0.0)  # a difference of two measurements may be below it


KINDS: dict[str, Callable[[Sequence[Row]], Any]] = {"tpot": tpot, "memory": memory, "split": split}


def default_kinds(rows: Sequence[Row]) -> list[str]:
    """The figures that rows can be drawn in."""
    return ["tpot", "memory"] + ["split"] * any("select" in (row.get("split") or {}) for row in rows)
