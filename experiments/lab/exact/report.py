"""The tables and the figure of `experiments.lab.exact`, also for the rows of parts that only older records have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.records import REFERENCE, device_kinds, legend, line_style, method_title, new_figure, tidy, token_label
from experiments.records.report import Column, Row, row_table

_DEPTHS = (2, 4, 8)
_DEPTH = 4  # the most drafted tokens of a pass, in the figure
_TITLES = {
    "accepted": "Tokens per pass by the most drafted tokens of a pass; bytes of the cache per token, in % of Full's; and "
    "tokens per pass of at most 4 drafted tokens by text and temperature",
    "speed": "Tokens per second on real text",
    "rejected": "Tokens per second where every drafted token is wrong",
    "shape": "Tokens per second with random weights, drafted tokens kept as measured",
    "judge": "Attention of several queries beside one query's",
    "equal": "Prompts whose tokens differ from Full's in float32",
}
_TIMES: dict[str, Column] = {
    "draft": "method", "rows": "batch", "tokens": "length", "depth": "depth", "tokens/s": ("value", 1, ".1f"),
    "Full": ("full", 1, ".1f"), "ratio": ("ratio", 1, ".3f"), "ratio, later": ("later_ratio", 1, ".3f"),
    "per pass": lambda row: _rounded(row["counters"].get("tokens_per_pass")), "ms": ("step_seconds", 1e3, ".2f"),
    "Full's ms": ("full_step_seconds", 1e3, ".2f"), "same": ("same", 1, ".0%"),
}  # fmt: skip
_COLUMNS: dict[str, dict[str, Column]] = {
    "speed": _TIMES,
    "rejected": _TIMES,
    "shape": _TIMES,
    "judge": {
        "tokens": "length", "rows": "batch", "devices": "parts", "queries": "queries", "us": ("value", 1e6, ".1f"),
        "of one": ("over_one", 1, ".3f"),
    },
    "equal": {
        "draft": "method", "tokens": "length", "depth": "depth", "prompts": "prompts", "differ": "value",
        "per pass": ("tokens_per_pass", 1, ".2f"),
    },
}  # fmt: skip


def tokens_per_pass(kept: Sequence[float], depth: int) -> float:
    """Compute the tokens of a pass over ``depth`` drafted tokens, from the share of each place that is kept.

    A token is kept only if all before it are.
    """
    return 1 + sum(kept[:depth])


def bytes_per_token(row: Row, kept: Sequence[float], depth: int) -> float:
    """Compute the bytes of keys, values and metadata that a token takes: of a pass and ``depth`` draft steps."""
    return (row["full_bytes"] + depth * row["draft_bytes"]) / tokens_per_pass(kept, depth)


def exact_tables(metrics: Sequence[Row]) -> str:
    """Make the Markdown tables of the record's rows, a table for each part."""
    tables = []
    for name, title in _TITLES.items():
        if rows := [row for row in metrics if row["name"] == name]:
            columns = _COLUMNS.get(name) or _accepted_columns(rows[0])
            if name != "judge":
                rows.sort(key=lambda row: (row["length"], row.get("batch", 0), -row.get("ratio", row["value"])))
            tables.append("\n".join([title, "", *row_table(rows, columns)]))
    return "\n\n".join(tables) + "\n"


def _accepted_columns(first: Row) -> dict[str, Column]:
    """Make the columns of rows of accepted tokens, which have a cell for each text and temperature of the first row."""
    columns: dict[str, Column] = {"draft": "method", "tokens": "length", "depth": "depth"}
    for depth in _DEPTHS:
        columns[f"per pass, {depth}"] = lambda row, n=depth: _at(row, n, f"{tokens_per_pass(row['kept'], n):.2f}")
    for depth in _DEPTHS:
        columns[f"bytes, {depth}"] = lambda row, n=depth: _at(row, n, f"{_share(row, n):.0f}")
    for cell in first["cells"]:
        key = cell["text"], cell["temperature"]
        heat = f"T = {key[1]:g}" if key[1] else "greedy"
        columns[f"{key[0]}, {heat}"] = lambda row, key=key: next(
            (f"{tokens_per_pass(x['kept'], 4):.2f}" for x in row["cells"] if (x["text"], x["temperature"]) == key), None
        )
    columns["kept"] = lambda row: " ".join(f"{x:.2f}" for x in row["kept"])
    return columns | {"same": ("same", 1, ".0%")}


def _share(row: Row, depth: int) -> float:
    return 100 * bytes_per_token(row, row["kept"], depth) / row["full_bytes"]


def _at(row: Row, depth: int, text: str) -> str | None:
    return text if depth <= len(row["kept"]) else None


def _rounded(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def figures(record: Mapping[str, Any]) -> tuple[dict[str, Callable[[], Any]], list[str]]:
    """Return the figure of a record: a function by name, and the name if the record's rows suffice."""
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
    lengths, names = sorted({row["length"] for row in rows}), list(dict.fromkeys(row["method"].split("(")[0] for row in rows))
    figure = new_figure(6.4 * len(lengths), 5.4)
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for panel, length in zip(panels, lengths, strict=True):
        for index, name in enumerate(names):
            mine = [row for row in rows if row["length"] == length and row["method"].split("(")[0] == name]
            if line := sorted((_share(row, _DEPTH), tokens_per_pass(row["kept"], _DEPTH)) for row in mine):
                panel.plot(*zip(*line, strict=True), label=method_title(name), **line_style(index))
        panel.axhline(_DEPTH + 1, color=REFERENCE, linestyle="--", linewidth=1, label="every drafted token kept")
        title = f"{record['settings']['model']}, {token_label(length)} tokens, {' and '.join(device_kinds(record))}"
        tidy(panel, title, "bytes of the cache per token, % of Full's", "tokens per pass, 4 drafted")
    legend(figure, list(panels), 4 * len(panels))
    return figure
