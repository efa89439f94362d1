"""The report of `experiments.lab.peers.speed` on a record: a printed line for each row, and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records import markdown_rows, method_title
from experiments.speed.rows import Row, failure, scaled, spread, titled

_HEAD = (
    "method", "cache", "compiled", "attention", "length", "rows", "TPOT ms", "tokens/s", "stored", "compile s", "cache GB",
    "peak GB", "notes",
)  # fmt: skip
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
        lines += [f"## {model}", "", *markdown_rows([_HEAD, *map(_cells, mine)]), ""]
    lines += [_LEGEND, ""]
    for run, about in notes.get("runs", {}).items():
        known = ", ".join(f"{name} {about['versions'][name]}" for name in _NAMED if name in about["versions"])
        lines.append(f"Run {run}: {about['device']}, {known}, commit {about['commit']}.")
    return "\n".join(lines) + "\n"


_NAMED = ("torch", "transformers", "kvpress", "flash-attn")


def _cells(row: Row) -> list[Any]:
    which = [method_title(row["method"]), *(row[name] for name in ("cache", "compiled", "attention", "length", "batch"))]
    if row["error"] is not None:
        return [*which, "", "", "", "", "", "", failure(row)]
    gigabytes = [scaled(row[name], 1e-9, ".2f") for name in ("cache_bytes", "peak_bytes")]
    amounts = [f"{row['tokens_per_second']:.1f}", row["stored_tokens"], scaled(row["compile_seconds"], 1, ".1f")]
    return [*which, spread(row, 1e3, 3), *amounts, *gigabytes, row["note"]]
