"""The tables of a record of `experiments.lab.peers.quality`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.lab.peers.quality.settings import METHODS, beside
from experiments.lab.peers.torch_device import run_line
from experiments.records import bootstrap_interval, markdown_rows
from experiments.speed.rows import Row, failure

_LEGEND = (
    "Scores are 0 to 100, of kvpress first and of kvjax second, on the same prompts and samples; the difference is kvpress "
    "less kvjax. The mean is over the tasks, and its difference has a 95 % paired bootstrap interval over all samples. Full "
    "is transformers alone beside kvjax's Full. Kept: tokens per KV head that kvpress left of a prompt, the mean over heads, "
    "layers and prompts. Presses have kvpress's defaults, and keep as many tokens as kvjax's budget."
)


def peer_scores(metrics: Sequence[Row], notes: Mapping[str, Any]) -> str:
    """Write the table of each length and budget, and lines about what made it.

    Args:
        metrics: the record's rows.
        notes: the record's notes.
    """
    lines = ["# Scores beside kvpress", "", "How well kvpress's presses answer, beside kvjax's methods.", ""]
    for length, budget in dict.fromkeys((row["length"], row["budget"]) for row in metrics):
        mine = [row for row in metrics if (row["length"], row["budget"]) == (length, budget)]
        lines += [f"## {length} tokens, {budget} kept", "", *_table(mine), ""]
    lines += [_LEGEND, ""]
    if about := notes.get("beside"):
        lines.append(f"kvjax: {about['model']} in {about['dtype']}, {about['device']}, commit {about['commit']}.")
    lines += [run_line(run, about) for run, about in notes.get("runs", {}).items()]
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Row]) -> list[str]:
    tasks = list(dict.fromkeys(row["name"] for row in rows))
    cells: list[list[Any]] = [["kvpress", "kvjax", *tasks, "mean", "difference", "kept", "notes"]]
    for method in METHODS:
        theirs = {row["name"]: row for row in rows if row["library"] != "kvjax" and row["method"] == method}
        if not theirs:
            continue
        ours = [row for base in beside(method) for row in rows if (row["library"], row["base"]) == ("kvjax", base)]
        labels = [row["method"] for row in ours]
        for label in dict.fromkeys(labels or [""]):
            mine = {row["name"]: row for row in ours if row["method"] == label}
            cells.append([method, label, *_scores(tasks, theirs, mine)])
    return markdown_rows(cells)


def _scores(tasks: Sequence[str], theirs: Mapping[str, Row], ours: Mapping[str, Row]) -> list[str]:
    """Format the cells of a pair of methods: a cell for each task, the mean, the difference, what is kept, and notes."""
    cells, differences, values, notes = [], [], [], []
    for task in tasks:
        a, b = theirs.get(task), ours.get(task)
        if a is not None and a["error"] is not None:
            notes.append(f"{task}: {failure(a)}")
        a = a if a is not None and a["error"] is None else None
        paired = a is not None and b is not None and a["scores"].keys() == b["scores"].keys()
        gaps = [a["scores"][key] - b["scores"][key] for key in a["scores"]] if paired else []
        gap_text = f" ({100 * float(np.mean(gaps)):+.1f})" if gaps else ""
        cells.append(f"{_value(a)} / {_value(b)}{gap_text}")
        differences += gaps
        if a is not None and b is not None:
            values.append((a["value"], b["value"]))
    whole = len(values) == len(tasks)
    means = " / ".join(f"{value:.1f}" for value in np.mean(values, axis=0)) if whole else ""
    gap = ""
    if whole and differences:
        low, high = bootstrap_interval(differences)
        gap = f"{100 * float(np.mean(differences)):+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
    kept = [row["kept_tokens"] for row in theirs.values() if row["error"] is None]
    return [*cells, means, gap, f"{float(np.mean(kept)):.1f}" if kept else "", "; ".join(dict.fromkeys(notes))]


def _value(row: Row | None) -> str:
    return "-" if row is None else f"{row['value']:.1f}"
