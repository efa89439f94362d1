"""Tables of the ablations, from their records alone."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.ablations.arms import Table
from experiments.records import markdown_rows

_HEAD = """# Ablations

What each part of the papers' methods is worth: one part is changed at a time.

Scores in percent, by each task's own scorer; the question is part of the prompt. n: samples of each cell. Attended: tokens
that enter the softmax of a decode step. Read: bytes of KV and metadata that a decode step reads, over Full's at the same
length. Both are means over the tasks. Intervals, knobs and seconds of every cell are in the JSON records."""


def outline(tables: Sequence[Table]) -> list[dict[str, Any]]:
    """The titles, texts and rows of tables; a record keeps them, so that it suffices to show its tables."""
    return [{"title": table.title, "text": table.text, "arms": [arm.name for arm in table.arms]} for table in tables]


def ablation_tables(records: Sequence[pathlib.Path], folder: pathlib.Path) -> str:
    """The tables of some records as a page.

    Args:
        records: the files of the records.
        folder: folder of the page, from which the records are linked.
    """
    lines = [_HEAD]
    for path in records:
        record = json.loads(path.read_text(encoding="utf-8"))
        settings, device = record["settings"], record["device"]["kind"]
        for table in record["notes"].get("tables", ()):
            mine = [m for m in record["metrics"] if m["table"] == table["title"] and m["arm"] in table["arms"]]
            if not mine:
                continue
            lines += ["", f"## {table['title']}", "", table["text"], "", *markdown_rows(_cells(table["arms"], mine)), ""]
            lengths = sorted({m["length"] for m in mine})
            lines.append(
                f"n = {samples(mine)}; {', '.join(map(str, lengths))} tokens; {settings['model']} model, "
                f"{settings['dtype']}, {device}; [record]({pathlib.Path(os.path.relpath(path, folder)).as_posix()})"
            )
    return "\n".join(lines) + "\n"


def _cells(arms: Sequence[str], metrics: Sequence[dict[str, Any]]) -> list[Sequence[Any]]:
    """The head and the rows of a table."""
    tasks = list(dict.fromkeys(m["name"] for m in metrics))
    cells: list[Sequence[Any]] = [("", *tasks, *["mean"] * (len(tasks) > 1), "attended", "read", "counters")]
    for arm in arms:
        mine = {m["name"]: m for m in metrics if m["arm"] == arm}
        if not mine:
            continue
        values = list(mine.values())
        whole = mean(values, "bytes_read_per_step") / mean(values, "full_bytes_read_per_step")
        cells.append(
            (
                arm,
                *(f"{mine[task]['value']:.1f}" if task in mine else "" for task in tasks),
                *[f"{mean(values, 'value'):.1f}"] * (len(tasks) > 1),
                f"{mean(values, 'attended_tokens'):.0f}",
                f"{100 * whole:.0f} %",
                counters(values),
            )
        )
    return cells


def mean(metrics: Sequence[dict[str, Any]], field: str) -> float:
    """Mean of a field over cells."""
    return float(np.mean([metric[field] for metric in metrics]))


def counters(metrics: Sequence[dict[str, Any]]) -> str:
    """Mean of every counter over those cells that have it, as text."""
    names = sorted({name for metric in metrics for name in metric["counters"]})
    means = {name: np.mean([m["counters"][name] for m in metrics if name in m["counters"]]) for name in names}
    return ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in means.items())


def samples(metrics: Sequence[dict[str, Any]]) -> str:
    """How many samples a cell has: a number, or the least and the most."""
    counts = sorted({metric["samples"] for metric in metrics})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
