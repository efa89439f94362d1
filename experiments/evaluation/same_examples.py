"""Refuses to put answers to other examples beside each other: a file that changed, or a version that makes other examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.benchmarks import Cell, Encoded, numbered
from experiments.evaluation.folder import Folder, read_examples

CELL = ("task", "length", "samples", "seed", "haystack", "depth", "questions", "source", "scored_tokens")
DIGEST = "examples_digest"  # of a row: `experiments.benchmarks.digest` of its examples' keys
_CHOOSE = "choose another --out, or begin anew with --force"


def from_file(row: Mapping[str, Any]) -> bool:
    """Tell whether the examples of a row, or of a cell's identity, come from a user's file."""
    return bool(row.get("source")) or ":" in (row.get("haystack") or "")


class Answered:
    """The examples that the rows of a folder answered, as the folder is now.

    Args:
        folder: the folder.

    Raises:
        ValueError: the folder lacks examples of a row.
    """

    def __init__(self, folder: Folder) -> None:
        self._path = folder.path
        self._rows = [
            (row, numbered(line["key"] for line in lines)) for row, lines in read_examples(folder.path, folder.rows)
        ]

    def check(self, encoded: Encoded) -> None:
        """Refuse a cell if a row answered other examples of it.

        The same examples must have been drawn; a row of fewer or more samples must hold some or all of them.
        """
        cell = encoded.cell
        wanted = {name: value for name, value in cell.identity.items() if name != "samples"}
        for row, keys in self._rows:
            if any(row.get(name) != value for name, value in wanted.items()):
                continue
            mine, theirs = set(encoded.keys), set(keys)
            same = mine == theirs if row.get("samples") == cell.samples else mine <= theirs or theirs <= mine
            if not same:
                raise self._changed(row, cell.source or cell.haystack or "", cell.title)

    def check_tasks(self, cells: Sequence[Cell]) -> None:
        """Refuse rows of tasks that their files, whose cells are all in ``cells``, no longer have."""
        tasks: dict[str, set[str]] = {}
        for cell in cells:
            if cell.source:
                tasks.setdefault(cell.source, set()).add(cell.task)
        for row, _ in self._rows:
            source, task = row.get("source") or "", row.get("task")
            if source in tasks and task not in tasks[source]:
                raise self._changed(row, source, f"{task}, which it no longer has,")

    def _changed(self, row: Mapping[str, Any], source: str, title: str) -> ValueError:
        who = "Full" if row["method"] == "full" else row["method"]
        what = f"{source} has" if source else "the examples have"
        return ValueError(f"{what} changed since {who} answered {title} in {self._path}: {_CHOOSE}")


def check_alike(rows: Iterable[Mapping[str, Any]]) -> None:
    """Refuse rows of one cell that answered other examples; rows of earlier versions, which keep no digest, pass.

    Raises:
        ValueError: two rows of a cell differ in the digest of their examples.
    """
    first: dict[tuple, Mapping[str, Any]] = {}
    for row in rows:
        if row.get(DIGEST) is None:
            continue
        other = first.setdefault(tuple(row.get(name) for name in CELL), row)
        if other[DIGEST] != row[DIGEST]:
            raise ValueError(
                f"{row['method']} and {other['method']} answered different examples of {row['name']}: the prompts, the "
                "references, the scorer or the limits changed between the two runs"
            )
