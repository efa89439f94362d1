"""Draws the figure of a record of `experiments.lab.exact`: tokens per pass against the bytes that a token costs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from experiments.lab.exact.accepted import bytes_per_token, tokens_per_pass
from experiments.records import REFERENCE, device_kinds, legend, line_style, method_title, new_figure, tidy, token_label

_DEPTH = 4  # the most drafted tokens of a pass
_NAMED = 4  # names in a row of the legend


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Return the figure of a record, for ``kvjax plot``: a function by name, and the name if the record's rows suffice."""
    drawn = any(row["name"] == "accepted" for row in record["metrics"])
    return {"exact": functools.partial(accepted, record)}, ["exact"] * drawn


def accepted(record: Mapping[str, Any]) -> Any:
    """Plot tokens per pass of four drafted tokens against bytes of the cache per token: a line of budgets for each draft.

    Raises:
        ValueError: the record has no drafts of four tokens.
    """
    rows = [row for row in record["metrics"] if row["name"] == "accepted" and len(row["kept"]) >= _DEPTH]
    if not rows:
        raise ValueError(f"the record has no accepted tokens of passes of {_DEPTH} drafted tokens")
    lengths = sorted({row["length"] for row in rows})
    figure = new_figure(6.4 * len(lengths), 5.4)
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for row in rows:
        share = 100 * bytes_per_token(row, row["kept"], _DEPTH) / row["full_bytes"]
        lines.setdefault(row["method"].split("(")[0], []).append(
            (row["length"], share, tokens_per_pass(row["kept"], _DEPTH))
        )
    for panel, length in zip(panels, lengths, strict=True):
        for index, (name, points) in enumerate(lines.items()):
            if mine := sorted(point[1:] for point in points if point[0] == length):
                panel.plot(*zip(*mine, strict=True), label=method_title(name), **line_style(index))
        panel.axhline(_DEPTH + 1, color=REFERENCE, linestyle="--", linewidth=1, label="every drafted token kept")
        card = " and ".join(device_kinds(record))
        title = f"{record['settings']['model']}, {token_label(length)} tokens, {card}"
        tidy(panel, title, "bytes of the cache per token, % of Full's", "tokens per pass, 4 drafted")
    legend(figure, list(panels), _NAMED * len(panels))
    return figure
