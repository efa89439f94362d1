"""Refuses to put answers to other examples beside each other: a file that changed, or a version that makes other examples."""

import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from experiments.benchmarks import Encoded, digest

CELL = ("task", "length", "seed", "haystack", "depth", "questions", "source", "scored_tokens")
DIGEST = "examples_digest"  # of a row: `experiments.benchmarks.digest` of its examples' keys


def from_file(row: Mapping[str, Any]) -> bool:
    """Tell whether the examples of a row, or of a cell's identity, come from a user's file."""
    return bool(row.get("source")) or ":" in (row.get("haystack") or "")


def check_answered(rows: Iterable[Mapping[str, Any]], encoded: Encoded, folder: pathlib.Path) -> None:
    """Refuse the examples of a cell if a row of the folder answered other examples of it."""
    cell = encoded.cell
    for row in rows:
        same_cell = all(row.get(name) == value for name, value in cell.identity.items())
        less = row.get("samples", cell.samples) - cell.samples
        mine = encoded.keys[: row["examples"]] if less < 0 else encoded.keys
        if same_cell and less <= 0 and row.get(DIGEST) not in (None, digest(mine)):
            source = cell.source or cell.haystack or ""
            what = f"{source} has" if source else "the examples have"
            who = {"full": "Full"}.get(row["method"], row["method"])
            raise ValueError(
                f"{what} changed since {who} answered {cell.title} in {folder}: choose another --out, or --force"
            )


def check_alike(rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuse rows of one cell that answered other examples; rows of earlier versions, which keep no digest, pass.

    Raises:
        ValueError: two rows of a cell differ in the digest of their examples.
    """
    first: dict[tuple, Mapping[str, Any]] = {}
    for row in rows:
        if row.get(DIGEST) is None:
            continue
        other = first.setdefault(tuple(row.get(name) for name in (*CELL, "samples")), row)
        if other[DIGEST] != row[DIGEST]:
            raise ValueError(
                f"{row['method']} and {other['method']} answered different examples of {row['name']}: the prompts, the "
                "references, the scorer or the limits changed between the two runs"
            )
