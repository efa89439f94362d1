"""The figure of memory over answers: resident bytes of a row against the tokens of prompt and answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.answering import PAPERS
from experiments.evaluation.comparison import BASELINE
from experiments.records import (
    QUIET,
    REFERENCE,
    amount_axis,
    chosen,
    label_lines,
    line_style,
    method_title,
    new_figure,
    tidy,
)

Row = Mapping[str, Any]


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
            lengths = dict.fromkeys(row.get("length") for row in cells)
            points = sorted(_point([row for row in cells if row.get("length") == length]) for length in lengths)
            panel.plot(*zip(*points, strict=True), **style)
            values += [held for _, held in points]
            last.append(points[-1])
        if style is not QUIET:
            ends.append((*max(last, key=lambda point: point[1]), method_title(name), style["color"]))
    amount_axis(panel, values)
    tidy(panel, "memory of a row", "tokens of prompt and answer", "MB of KV cache resident per row")
    label_lines(panel, ends)
    return figure


def _point(rows: Sequence[Row]) -> tuple[float, float]:
    """Average the tokens of prompt and answer, and the megabytes per row."""
    tokens, held = (float(np.mean([row[name] for row in rows])) for name in ("length_tokens", "resident_bytes_per_row"))
    return tokens, held / 1e6
