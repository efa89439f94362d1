"""The tables of a record of `experiments.speed.offload`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.records import markdown_rows, method_title
from experiments.speed.rows import Row, failure, run_line, scaled, spread, titled

_LEGEND = (
    "TPOT: milliseconds per output token, median (least - most). Resident: TPOT with everything on the device. "
    "Bus: megabytes that a step reads from host memory, over all rows and layers; GB/s: these bytes over the time by which "
    "the step is longer than the resident step, if the resident step was measured. Layers: number of layers with rows in "
    "host memory. Hot: share of the rows attended in these layers that have a copy on the device. Device, host: gigabytes "
    "of the cache."
)
_PROMPTS = (
    "Seconds to prefill a prompt into host memory, median (least - most); the largest device memory of the process, the "
    "weights in it, and the memory that the process was given; gigabytes of keys and values in host memory."
)
_PROMPT_HEAD = (
    "method",
    "length",
    "rows",
    "chunk",
    "seconds",
    "tokens/s",
    "peak device GB",
    "weights GB",
    "given GB",
    "host GB",
    "notes",
)


def offload_tables(metrics: Sequence[Row], notes: Mapping[str, Any]) -> str:
    """Write the tables of a record, and a line for each run.

    Args:
        metrics: the record's rows.
        notes: the record's notes.
    """
    head = (
        "method",
        "length",
        "rows",
        "layers",
        "TPOT ms",
        "resident ms",
        "tokens/s",
        "bus MB",
        "GB/s",
        "hot",
        "device GB",
        "host GB",
        "notes",
    )
    lines = [titled("Decoding from host memory", metrics, notes), ""]
    lines += ["How long a token takes when keys and values of some or all layers are in pinned host memory.", ""]
    for model in dict.fromkeys(row["model"] for row in metrics):
        mine = [row for row in metrics if row["model"] == model]
        mine.sort(key=lambda row: (row["length"], row["batch"], -row["share"]))
        steps = [row for row in mine if row["name"] != "prefill"]
        prompts = [row for row in mine if row["name"] == "prefill"]
        lines += [f"## {model}", ""]
        if steps:
            lines += [*markdown_rows([head, *filter(None, (_line(row, steps) for row in steps))]), ""]
        if prompts:
            lines += ["### Prompts", "", *markdown_rows([_PROMPT_HEAD, *map(_prompt_line, prompts)]), ""]
    kinds = {row["name"] == "prefill" for row in metrics}
    for legend in [_LEGEND] * (False in kinds) + [_PROMPTS] * (True in kinds):
        lines += [legend, ""]
    for run, about in notes.get("runs", {}).items():
        link = notes.get("links", {}).get(run)
        bus = f", host to device {link / 1e9:.1f} GB/s" if link else ""
        lines.append(run_line(run, about, bus))
    return "\n".join(lines) + "\n"


def _prompt_line(row: Row) -> list[Any]:
    """Format a row of the table of prompts."""
    key = [method_title(row["method"]), *(row[name] for name in ("length", "batch", "chunk_size"))]
    if row["error"] is not None:
        return [*key, *[""] * 6, failure(row, 80)]
    gigabytes = [row[name] for name in ("peak_bytes", "weight_bytes", "device_limit", "host_bytes")]
    return [
        *key,
        spread(row, 1, 2),
        f"{row['tokens_per_second']:.0f}",
        *(scaled(size, 1e-9, ".1f") for size in gigabytes),
        _note(row),
    ]


def _note(row: Row) -> str:
    """Return a row's note without the part that holds for the whole table."""
    return "; ".join(part for part in row["note"].split("; ") if part != "offload=True")


def _line(row: Row, metrics: Sequence[Row]) -> list[Any] | None:
    """Format a row of the table of a model; None for a resident row that is shown beside its offloaded row."""
    key = {name: row[name] for name in ("method", "length", "batch")}
    shown = [method_title(row["method"]), row["length"], row["batch"]]
    if row["error"] is not None:
        return [*shown, *[""] * 9, f"{row['name']}: {failure(row, 80)}"]
    alike = [x for x in metrics if key.items() <= x.items() and x["error"] is None]
    other = next((x for x in alike if x["name"] == "resident"), None)
    hosted = row["name"] == "offload"
    if not hosted and len(alike) > 1:
        return None
    extra = row["value"] - other["value"] if hosted and other else 0
    return [
        *shown,
        row["layers"],
        spread(row, 1e3, 3) if hosted else "",
        f"{1e3 * other['value']:.3f}" if other else "",
        f"{row['tokens_per_second']:.1f}",
        f"{row['bus_bytes'] / 1e6:.2f}" if hosted else "",
        f"{row['bus_bytes'] / extra / 1e9:.1f}" if extra > 0 and row["bus_bytes"] else "",
        f"{100 * row['hot']:.1f} %" if hosted else "",
        f"{row['device_bytes'] / 1e9:.2f}",
        f"{row['host_bytes'] / 1e9:.2f}",
        _note(row),
    ]
