"""The tables of `experiments.speed.exact`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.speed.exact.accepted import bytes_per_token, tokens_per_pass

_DEPTHS = (2, 4, 8)
Row = Mapping[str, Any]


def exact_tables(metrics: Sequence[Row]) -> str:
    """Make the Markdown tables of the record's rows, a table for each part."""
    made = []
    for name, table in (("accepted", _accepted), ("speed", _times), ("rejected", _times), ("shape", _times), ("equal", _equal)):
        if rows := [row for row in metrics if row["name"] == name]:
            made.append(table(name, rows))
    return "\n\n".join(made) + "\n"


def _accepted(name: str, rows: Sequence[Row]) -> str:
    cells = [(cell["text"], cell["temperature"]) for cell in rows[0]["cells"]]
    heads = [f"{text}, {'greedy' if not heat else f'T = {heat:g}'}" for text, heat in cells]
    top = ["draft", "tokens", "depth", *[f"per pass, {n}" for n in _DEPTHS], *[f"bytes, {n}" for n in _DEPTHS], *heads, "kept", "same"]
    lines = ["Tokens per pass by the most drafted tokens, and bytes of the cache per token, % of Full's; single texts at most 4", "", *_head(top)]
    for row in sorted(rows, key=lambda row: (row["length"], -row["value"])):
        kept = row["kept"]
        by = {depth: depth <= len(kept) for depth in _DEPTHS}
        own = {(cell["text"], cell["temperature"]): cell["kept"] for cell in row["cells"]}
        lines.append(_line([
            row["method"], row["length"], row["depth"],
            *[f"{tokens_per_pass(kept, n):.2f}" if by[n] else "" for n in _DEPTHS],
            *[f"{100 * bytes_per_token(row, kept, n) / row['full_bytes']:.0f}" if by[n] else "" for n in _DEPTHS],
            *[f"{tokens_per_pass(own[cell], min(4, len(kept))):.2f}" if cell in own else "" for cell in cells],
            " ".join(f"{x:.2f}" for x in kept), f"{100 * row['same']:.0f} %",
        ]))  # fmt: skip
    return "\n".join(lines)


def _times(name: str, rows: Sequence[Row]) -> str:
    titles = {
        "speed": "Tokens per second on real text",
        "rejected": "Tokens per second where every drafted token is wrong",
        "shape": "Tokens per second with random weights, drafted tokens kept as measured",
    }
    lines = [titles[name], "", *_head(["draft", "rows", "tokens", "depth", "tokens/s", "Full", "ratio", "ratio, later", "per pass", "same"])]
    for row in sorted(rows, key=lambda row: (row["length"], row["batch"], -row["ratio"])):
        same = "" if row["same"] is None else f"{100 * row['same']:.0f} %"
        per = row["counters"].get("tokens_per_pass")
        lines.append(_line([
            row["method"], row["batch"], row["length"], row["depth"], f"{row['value']:.1f}", f"{row['full']:.1f}",
            f"{row['ratio']:.2f}" if name != "rejected" else f"{row['ratio']:.3f}", f"{row['later_ratio']:.3f}",
            "" if per is None else f"{per:.2f}", same,
        ]))  # fmt: skip
    return "\n".join(lines)


def _equal(name: str, rows: Sequence[Row]) -> str:
    lines = ["Prompts whose tokens differ from Full's in float32", "", *_head(["draft", "tokens", "depth", "prompts", "differ", "per pass"])]
    lines += [
        _line([row["method"], row["length"], row["depth"], row["prompts"], row["value"], f"{row['tokens_per_pass']:.2f}"])
        for row in rows
    ]
    return "\n".join(lines)


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
