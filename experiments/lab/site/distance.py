"""The parts about the distance from Full: KL and top-1 agreement of every method, by records of `experiments.lab.fidelity`."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.cli import read_record
from experiments.lab.site.marks import missing
from experiments.lab.site.runs import Row, share
from experiments.records import device_kinds, markdown_rows, method_title, token_label

RECORDS = {"fidelity": "base", "qwen-fidelity": "qwen"}  # parts of pages, and their folders of docs/records/fidelity
LONG = {"qwen-fidelity-1024": "qwen-1024"}  # the same for records of so many steps that a method may drift
_END = 128  # steps at the beginning and at the end of a text that are compared
_STREAMS = {
    "prose": "Along prose",
    "code": "Along files of Python's library",
    "answers": "Along the right answers of long tasks",
    "greedy": "Along Full's own answers to long tasks",
}


def parts(docs: pathlib.Path) -> dict[str, Callable[[], str]]:
    """Return the functions that make the parts, by name; see `experiments.lab.site.marks`."""
    made = {}
    for write, records in ((distances, RECORDS), (drift, LONG)):
        for name, record in records.items():
            there = (docs / "records" / "fidelity" / record / "metrics.json").is_file()
            made[name] = functools.partial(write, docs, record) if there else functools.partial(missing, docs, (name,))
    return made


def distances(docs: pathlib.Path, name: str) -> str:
    """Write a table for each stream of a record, the figures, and a link to the table with intervals."""
    folder = f"records/fidelity/{name}"
    record = read_record(docs / folder)
    made = [_about(record)]
    for stream in dict.fromkeys(row["stream"] for row in record["metrics"]):
        rows = [row for row in record["metrics"] if row["stream"] == stream]
        made += [f"{_STREAMS[stream]}, KL in nats and the share of steps with Full's most likely token:", _table(rows)]
    made += [
        f"![KL against bytes read per step]({folder}/fidelity.png)",
        f"![KL along the text]({folder}/along.png)",
        f"[With intervals, perplexities, and the nearest method of no more bytes]({folder}/table.md).",
    ]
    return "\n\n".join(made)


def drift(docs: pathlib.Path, name: str) -> str:
    """Write a table for each stream of a record, with the distances at both ends of the texts, and the figure."""
    folder = f"records/fidelity/{name}"
    record = read_record(docs / folder)
    made = [
        f"{_about(record)} Read: the share of what Full reads, in the last step. The last two columns are ratios of KL: of "
        f"the last {_END} steps to the first {_END}, and of the second half of the steps to the first half. They have no "
        "intervals, because the record holds each step's mean over the texts."
    ]
    for stream in dict.fromkeys(row["stream"] for row in record["metrics"]):
        rows = [row for row in record["metrics"] if row["stream"] == stream and row["method"] != "full"]
        told = "KL in nats and the share of steps with Full's most likely token"
        length = token_label(max(row["length"] for row in rows))
        made += [f"{_STREAMS[stream]} at {length} tokens, {told}:", _drift_table(rows)]
    made += [f"![KL along the text]({folder}/along.png)", f"[With intervals and perplexities]({folder}/table.md)."]
    return "\n\n".join(made)


def _about(record: Mapping[str, Any]) -> str:
    """Tell the model, the devices, and how much text a record is of."""
    settings = record["settings"]
    return (
        f"Model `{settings['model']}`, {settings['dtype']}, {' and '.join(device_kinds(record))}; {settings['samples']} "
        f"texts of a stream, up to {settings['tokens']:,} steps along each."
    )


def _drift_table(rows: Sequence[Row]) -> str:
    """Write a row for each method, the nearest to Full first."""
    body = []
    for row in sorted(rows, key=lambda row: row["value"]):
        kl, agrees = (np.asarray(row["by_step"][name]) for name in ("kl", "agrees"))
        ends = [f"{kl[at].mean():.2g} ({100 * agrees[at].mean():.0f} %)" for at in (slice(_END), slice(-_END, None))]
        half = len(kl) // 2
        ratios = kl[-_END:].mean() / kl[:_END].mean(), kl[half:].mean() / kl[:half].mean()
        every = f"{row['value']:.2g} ({row['agreement']:.0f} %)"
        body.append((method_title(row["method"]), share(row), every, *ends, *(f"{ratio:.1f}" for ratio in ratios)))
    head = ("method", "read", "all steps", f"first {_END}", f"last {_END}", "last to first", "halves")
    return "\n".join(markdown_rows([head, *body]))


def _table(rows: Sequence[Row]) -> str:
    """Write a row for each method, the nearest to Full at the longest length first; Full is left out."""
    lengths = sorted({row["length"] for row in rows})
    at = {(row["method"], row["length"]): row for row in rows if row["method"] != "full"}
    methods = dict.fromkeys(method for method, _ in at)
    body = []
    for method in sorted(
        methods, key=lambda method: at[method, lengths[-1]]["value"] if (method, lengths[-1]) in at else np.inf
    ):
        mine = [at.get((method, length)) for length in lengths]
        longest = next(row for row in reversed(mine) if row is not None)
        shown = ("" if row is None else f"{row['value']:.2g} ({row['agreement']:.0f} %)" for row in mine)
        body.append((method_title(method), share(longest), *shown))
    head = ("method", f"read at {token_label(lengths[-1])}", *(f"{token_label(length)} tokens" for length in lengths))
    return "\n".join(markdown_rows([head, *body]))
