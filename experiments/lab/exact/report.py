"""The tables of `experiments.lab.exact`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lab.exact.accepted import bytes_per_token, tokens_per_pass

_DEPTHS = (2, 4, 8)
_ACCEPTED = (
    "Tokens per pass by the most drafted tokens of a pass; bytes of the cache per token, in % of Full's; and tokens per pass "
    "of at most 4 drafted tokens by text and temperature"
)
_TITLES = {
    "speed": "Tokens per second on real text",
    "rejected": "Tokens per second where every drafted token is wrong",
    "shape": "Tokens per second with random weights, drafted tokens kept as measured",
}
Row = Mapping[str, Any]


def exact_tables(metrics: Sequence[Row]) -> str:
    """Make the Markdown tables of the record's rows, a table for each part."""
    tables = {
        "accepted": _accepted,
        "speed": _times,
        "rejected": _times,
        "shape": _shapes,
        "judge": _judge,
        "equal": _equal,
    }
    made = []
    for name, table in tables.items():
        if rows := [row for row in metrics if row["name"] == name]:
            made.append("\n".join(table(rows)))
    return "\n\n".join(made) + "\n"


def _accepted(rows: Sequence[Row]) -> list[str]:
    cells = [(cell["text"], cell["temperature"]) for cell in rows[0]["cells"]]
    heads = [f"{text}, {f'T = {heat:g}' if heat else 'greedy'}" for text, heat in cells]
    each = [f"{what}, {depth}" for what in ("per pass", "bytes") for depth in _DEPTHS]
    made = [_ACCEPTED, "", *_head(["draft", "tokens", "depth", *each, *heads, "kept", "same"])]
    for row in sorted(rows, key=lambda row: (row["length"], -row["value"])):
        kept = row["kept"]
        own = {(cell["text"], cell["temperature"]): cell["kept"] for cell in row["cells"]}
        shares = {n: 100 * bytes_per_token(row, kept, n) / row["full_bytes"] for n in _DEPTHS}
        made.append(_line([
            row["method"], row["length"], row["depth"],
            *[f"{tokens_per_pass(kept, n):.2f}" if n <= len(kept) else "" for n in _DEPTHS],
            *[f"{shares[n]:.0f}" if n <= len(kept) else "" for n in _DEPTHS],
            *[f"{tokens_per_pass(own[cell], min(4, len(kept))):.2f}" if cell in own else "" for cell in cells],
            " ".join(f"{x:.2f}" for x in kept), f"{100 * row['same']:.0f} %",
        ]))  # fmt: skip
    return made


def _times(rows: Sequence[Row]) -> list[str]:
    heads = [
        "draft",
        "rows",
        "tokens",
        "depth",
        "tokens/s",
        "Full",
        "ratio",
        "ratio, later",
        "per pass",
        "ms",
        "Full's ms",
        "same",
    ]
    made = [_TITLES[rows[0]["name"]], "", *_head(heads)]
    for row in sorted(rows, key=lambda row: (row["length"], row["batch"], -row["ratio"])):
        same = "" if row["same"] is None else f"{100 * row['same']:.0f} %"
        per_pass = row["counters"].get("tokens_per_pass")
        made.append(_line([
            row["method"], row["batch"], row["length"], row["depth"], f"{row['value']:.1f}", f"{row['full']:.1f}",
            f"{row['ratio']:.3f}", f"{row['later_ratio']:.3f}", "" if per_pass is None else f"{per_pass:.2f}",
            *[f"{1e3 * row[name]:.2f}" if name in row else "" for name in ("step_seconds", "full_step_seconds")], same,
        ]))  # fmt: skip
    return made


def _shapes(rows: Sequence[Row]) -> list[str]:
    """Make the table of times, and a table of the kernels of each row that was profiled, and of Full."""
    made, full = _times(rows), set()
    for row in rows:
        if row.get("profile") is None:
            continue
        size = row["length"], row["batch"]
        if size not in full and row["full_profile"] is not None:
            full.add(size)
            made += ["", *_kernels("Full", row, row["full_profile"], row["full_step_seconds"])]
        made += ["", *_kernels(f"{row['method']}, depth {row['depth']}", row, row["profile"], row["step_seconds"])]
    return made


def _kernels(name: str, row: Row, profile: Row, seconds: float) -> list[str]:
    parts = ", ".join(f"{part} {1e3 * took:.2f} ms in {count:.0f}" for part, (count, took) in profile["parts"].items())
    told = (
        f"{name}, {row['batch']} rows of {row['length']}: {1e3 * seconds:.2f} ms a round or step; kernels ran "
        f"{1e3 * profile['busy']:.2f} ms, so the device waited {1e3 * (seconds - profile['busy']):.2f} ms; "
        f"{profile['count']:.0f} kernels: {parts}"
    )
    listed = [*profile["kernels"], ["others", *profile["others"]]]
    lines = [_line([name[:60], f"{count:.1f}", f"{1e6 * took:.1f}"]) for name, count, took in listed]
    return [told, "", *_head(["kernel", "a round", "us a round"]), *lines]


def _judge(rows: Sequence[Row]) -> list[str]:
    made = [
        "Attention of several queries beside one query's",
        "",
        *_head(["tokens", "rows", "devices", "queries", "us", "of one"]),
    ]
    for row in rows:
        given = [row[name] for name in ("length", "batch", "parts", "queries")]
        made.append(_line([*given, f"{1e6 * row['value']:.1f}", f"{row['over_one']:.3f}"]))
    return made


def _equal(rows: Sequence[Row]) -> list[str]:
    heads = ["draft", "tokens", "depth", "prompts", "differ", "per pass"]
    made = ["Prompts whose tokens differ from Full's in float32", "", *_head(heads)]
    for row in rows:
        given = [row[name] for name in ("method", "length", "depth", "prompts", "value")]
        made.append(_line([*given, f"{row['tokens_per_pass']:.2f}"]))
    return made


def _head(names: Sequence[str]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]


def _line(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
