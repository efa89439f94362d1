"""The parts about the distance from Full: KL and top-1 agreement of every method, by records of `experiments.fidelity`."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from experiments.cli import read_record
from experiments.records import device_kinds, markdown_rows, method_title, token_label
from experiments.site.marks import missing
from experiments.site.runs import Row, share

RECORDS = {"fidelity": "base", "qwen-fidelity": "qwen"}  # parts of pages, and their folders of docs/records/fidelity
_STREAMS = {
    "prose": "Along prose",
    "code": "Along files of Python's library",
    "answers": "Along the right answers of long tasks",
    "greedy": "Along Full's own answers to long tasks",
}


def parts(docs: pathlib.Path) -> dict[str, Callable[[], str]]:
    """Return the functions that make the parts, by name; see `experiments.site.marks`."""
    made = {}
    for name, record in RECORDS.items():
        there = (docs / "records" / "fidelity" / record / "metrics.json").is_file()
        made[name] = functools.partial(distances, docs, record) if there else functools.partial(missing, docs, (name,))
    return made


def distances(docs: pathlib.Path, name: str) -> str:
    """Write a table for each stream of a record, the figures, and a link to the table with intervals."""
    folder = f"records/fidelity/{name}"
    record = read_record(docs / folder)
    settings = record["settings"]
    told = (
        f"Model `{settings['model']}`, {settings['dtype']}, {' and '.join(device_kinds(record))}; {settings['samples']} "
        f"texts of a stream, up to {settings['tokens']} steps along each."
    )
    made = [told]
    for stream in dict.fromkeys(row["stream"] for row in record["metrics"]):
        rows = [row for row in record["metrics"] if row["stream"] == stream]
        made += [f"{_STREAMS[stream]}, KL in nats and the share of steps with Full's most likely token:", _table(rows)]
    made += [
        f"![KL against bytes read per step]({folder}/fidelity.png)",
        f"![KL along the text]({folder}/along.png)",
        f"[With intervals, perplexities, and the nearest method of no more bytes]({folder}/table.md).",
    ]
    return "\n\n".join(made)


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
