"""The table of `experiments.speed.tpu_bytes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records import markdown_rows, method_title


def tpu_bytes_table(metrics: Sequence[Mapping[str, Any]], notes: Mapping[str, Any]) -> str:
    """Write the page of a record's table."""
    head = ["method", "prompt tokens", "implementation", "MB accessed", "MiB of temporaries", "kernels in the program"]
    rows = [
        [
            method_title(row["method"]),
            row["length"],
            row["implementation"],
            f"{row['value'] / 1e6:.1f}",
            f"{row['temporaries'] / 2**20:.2f}",
            ", ".join(f"{count} {name}" for name, count in row["kernels"].items()) or "none",
        ]
        for row in metrics
    ]
    about = (
        "What XLA's cost model says of one decode step compiled for a TPU v5e, in two layers with the heads of Llama-3.1-8B\n"
        "and small weights. **Nothing was run.** [TPUs](../tpu.md) says how to read it."
    )
    return "\n".join(["# Bytes of a step on a TPU", "", about, "", *markdown_rows([head, *rows]), ""])
