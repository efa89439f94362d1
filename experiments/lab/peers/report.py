"""The report of `experiments.lab.peers` on a record: a printed line for each row, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.lab.peers.settings import SHOWN
from experiments.records import method_title
from experiments.records.report import Column, row_table
from experiments.speed.rows import Row, failure, spread, titled

_COLUMNS: dict[str, Column] = {
    "method": lambda row: method_title(row["method"]),
    **{name: name for name in ("cache", "compiled", "attention", "length")},
    "rows": "batch",
    "TPOT ms": lambda row: spread(row, 1e3, 3) if row["error"] is None else None,
    "tokens/s": ("tokens_per_second", 1, ".1f"),
    "stored": "stored_tokens",
    "compile s": ("compile_seconds", 1, ".1f"),
    "cache GB": ("cache_bytes", 1e-9, ".2f"),
    "peak GB": ("peak_bytes", 1e-9, ".2f"),
    "notes": lambda row: row["note"] if row["error"] is None else failure(row),
}
_LEGEND = (
    "TPOT: milliseconds per output token of Hugging Face's `generate`, median (least - most) of the repeats, greedy, without "
    "its first token. Compiled: the mode of torch.compile. Stored: tokens per KV head that are in the cache before decoding. "
    "Compile: seconds that the first call took beyond its tokens; what an earlier run left in the compiler's cache on disk "
    "makes it shorter. Peak: gigabytes that torch held at most while it decoded, with the weights."
)


def line(row: Row) -> str:
    """Format a row as a printed line."""
    begin = f"{row['method']:17s} {row['cache']:7s} {row['compiled']:15s} {row['length']:8d} {row['batch']:4d}"
    if row["error"] is not None:
        return f"{begin} {failure(row, 120)}"
    return f"{begin} {1e3 * row['value']:10.3f} ms  {row['wall_seconds']:.0f} s"


def peer_tables(metrics: Sequence[Row], notes: Mapping[str, Any]) -> str:
    """Write the table of each model, and a line for each run.

    Args:
        metrics: the record's rows.
        notes: the record's notes.
    """
    models = dict.fromkeys(row["model"] for row in metrics)
    lines = [titled("Decoding in PyTorch", metrics, notes), ""]
    lines += ["How long a decode step takes in Hugging Face transformers and with kvpress.", ""]
    for model in models:
        mine = sorted((row for row in metrics if row["model"] == model), key=lambda row: (row["length"], row["batch"]))
        lines += [f"## {model}", "", *row_table(mine, _COLUMNS), ""]
    lines += [_LEGEND, ""]
    for run, about in notes.get("runs", {}).items():
        known = ", ".join(f"{name} {about['versions'][name]}" for name in SHOWN if name in about["versions"])
        lines.append(f"Run {run}: {about['device']}, {known}, commit {about['commit']}.")
    return "\n".join(lines) + "\n"
