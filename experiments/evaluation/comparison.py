"""Compares methods with Full, or another reference, example by example: differences with their intervals."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.answering import budget_of, without_effect
from experiments.benchmarks import numbered
from experiments.cli import naming, read_record
from experiments.evaluation.folder import read_examples
from experiments.evaluation.reachable import BASELINE as BASELINE
from experiments.evaluation.reachable import row_point, shares
from experiments.evaluation.same_examples import CELL, check_alike
from experiments.records import bootstrap_interval as interval
from experiments.records import check_library, method_title

_COMMON = (
    "model", "dtype", "weights", "template", "template_variables", "system", "eos_token_ids", "truncation", "max_length",
    "max_new_tokens", "seed",
)  # fmt: skip
COUNTED = 60.0  # percent; a task with a lower score of Full is in no mean of the main table
FEW = 20  # contexts; if fewer contexts all score alike, a bootstrap interval has no width, which is no evidence


@dataclasses.dataclass(frozen=True)
class Entry:
    """A row with its examples.

    Attributes:
        folder: the folder that holds the row.
        row: the metric.
        examples: by the example's key, each as `experiments.evaluation.examples.brief` gives it.
    """

    folder: pathlib.Path
    row: dict[str, Any]
    examples: dict[str, Mapping[str, Any]]

    @property
    def cell(self) -> tuple:
        """The fields that say which examples were answered."""
        return tuple(self.row.get(name) for name in CELL)


@dataclasses.dataclass(frozen=True)
class Compared:
    """A row beside the reference's on the same examples.

    Attributes:
        row: the metric.
        difference: the row's score less the reference's, in points, on the examples that both have.
        interval_95: of the difference, by paired bootstrap over examples (over contexts, where examples share them).
        same: percent of examples answered word for word as under the reference.
        contexts: number of these examples' contexts; an example that shares no context counts as one.
        reference: the label of the method that the row is compared with.
        comparable: the row's score; of a row on other samples than the reference's, the reference's score and `difference`.
    """

    row: dict[str, Any]
    difference: float
    interval_95: tuple[float, float]
    same: float
    contexts: int
    reference: str
    comparable: float

    @property
    def is_reference(self) -> bool:
        """Whether the row is the reference's own."""
        return self.row["method"] == self.reference

    @property
    def beyond_noise(self) -> bool:
        """Whether the interval leaves out zero, and has a width or comes from at least `FEW` contexts."""
        low, high = self.interval_95
        return (low > 0 or high < 0) and (low < high or self.contexts >= FEW)


def load(folders: Sequence[pathlib.Path]) -> list[Entry]:
    """Load every row of every folder with its examples.

    Raises:
        ValueError: a path that is no result folder, folders of different settings, missing predictions, or damaged files.
    """
    entries, first = [], None
    for folder in folders:
        record = read_record(folder)
        if record["experiment"] != "eval" or not folder.is_dir():
            what = record["experiment"] if folder.is_dir() else "a file"
            raise ValueError(f"{folder} is {what}, expected a result folder of eval")
        settings = {name: record["settings"][name] for name in _COMMON if name in record["settings"]}
        first = first or settings
        if other := {name: (first[name], x) for name, x in settings.items() if first.get(name, x) != x}:
            raise ValueError(f"folders must have the same settings, but {folders[0]} and {folder} differ: {other}")
        with naming(folder):
            entries += [_entry(folder, row, lines) for row, lines in read_examples(folder, record["metrics"])]
    check_library([entry.row for entry in entries], " and ".join(map(str, folders)))
    check_alike(entry.row for entry in entries)
    return entries


def _entry(folder: pathlib.Path, row: dict[str, Any], lines: Sequence[Mapping[str, Any]]) -> Entry:
    return Entry(folder, named(row), dict(zip(numbered(line["key"] for line in lines), lines, strict=True)))


def named(row: Mapping[str, Any]) -> dict[str, Any]:
    """Add the name of the file to the name of a row's task, which several files may have."""
    return {**row, "name": f"{row['name']} ({pathlib.PurePath(row['source']).name})" if row.get("source") else row["name"]}


def reference_of(entries: Sequence[Entry], name: str) -> str:
    """Find the label of a reference: a label, or the name of a method that the entries have at one setting.

    Raises:
        ValueError: no method or several methods of the entries are called so.
    """
    labels = list(dict.fromkeys(entry.row["method"] for entry in entries))
    found = [x for x in labels if x == name] or [x for x in labels if x.partition("(")[0] == name.lower()]
    if len(found) != 1:
        raise ValueError(f"reference must be one of the methods here, got {name!r}; expected {', '.join(found or labels)}")
    return found[0]


def beside_reference(entries: Sequence[Entry], reference: str = BASELINE) -> list[Compared]:
    """Compare every row with the reference's row of the same cell.

    If the reference was asked the question in several ways (prefill, extend, turns), its row that was asked in the same way
    is taken.

    Args:
        entries: see `load`; if a row occurs twice, the first counts.
        reference: the label of a method; see `reference_of`.

    Returns:
        An item for each row, the reference's own included. Methods keep the order of their first rows. The rows of a
        method stand together: first the setting without knobs, then the other settings by the bytes that a decode step reads.
    """
    bases: dict[tuple, Entry] = {}
    for entry in entries:
        if entry.row["method"] == reference:
            bases.setdefault((*entry.cell, entry.row["question"]), entry)
            bases.setdefault(entry.cell, entry)  # for methods that were asked in another way than the reference
    compared: dict[tuple, Compared] = {}
    for entry in entries:
        base = bases.get((*entry.cell, entry.row["question"]), bases.get(entry.cell))
        if base is None:
            at = entry.row.get("length") or "its own lengths"
            raise ValueError(
                f"{entry.folder}: {entry.row['method']} on {entry.row['name']} at {at} has no row of "
                f"{method_title(reference)} beside it; without its baseline a score says nothing"
            )
        key = (entry.row["method"], entry.row["question"], entry.cell)
        compared.setdefault(key, _against(entry, base))
    place = place_of([item.row for item in compared.values()])
    return sorted(compared.values(), key=lambda item: place(item.row))


def place_of(rows: Sequence[Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], tuple[int, bool, float, str]]:
    """Return a sorting key that orders rows as `beside_reference` does, in whatever order several processes wrote them."""
    families: dict[str, int] = {}
    reads: dict[str, float] = {}
    for row in rows:
        families.setdefault(row["method"].partition("(")[0], len(families))
        reads.setdefault(row["method"], row.get("bytes_read_per_step") or 0.0)

    def place(row: Mapping[str, Any]) -> tuple[int, bool, float, str]:
        family, bracket, _ = row["method"].partition("(")
        return families[family], bool(bracket), reads[row["method"]], row["method"]

    return place


def _against(entry: Entry, base: Entry) -> Compared:
    few, many = sorted((entry.examples.keys(), base.examples.keys()), key=len)
    alike = entry.row.get("samples") == base.row.get("samples")
    if other := few ^ many if alike else few - many:
        raise ValueError(
            f"{entry.row['method']} and {base.row['method']} answered different examples of {entry.row['name']}: "
            f"{len(other)} keys are not in both; a key holds the prompt, the references, the scorer and the limits"
        )
    pairs = [(entry.examples[key], theirs) for key, theirs in base.examples.items() if key in entry.examples]
    changes = [mine["score"] - theirs["score"] for mine, theirs in pairs]
    groups = [theirs["group"] for _, theirs in pairs]
    difference, low, high = (round(100 * value, 2) for value in (float(np.mean(changes)), *interval(changes, groups)))
    same = round(100 * float(np.mean([mine["answer"] == theirs["answer"] for mine, theirs in pairs])), 1)
    contexts = len({group or number for number, group in enumerate(groups)})
    comparable = entry.row["value"] if alike else round(base.row["value"] + difference, 2)
    return Compared(entry.row, difference, (low, high), same, contexts, base.row["method"], comparable)


def averages(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Average scores over tasks, for each method, way of asking the question, and length.

    Only methods that have the same cells as the reference are averaged: means over different tasks cannot be compared.
    ``budget`` is the mean of `budget_of`, ``of_oracle`` is of `experiments.evaluation.reachable`.
    """
    groups: dict[tuple, list[Compared]] = {}
    for item in compared:
        groups.setdefault((item.row["method"], item.row["question"], item.row.get("length")), []).append(item)
    cells: dict[Any, set] = {}
    for (_, _, length), members in groups.items():
        if members[0].is_reference:
            cells.setdefault(length, set()).update(_cell_names(members))
    means = []
    for (method, question, length), members in groups.items():
        if set(_cell_names(members)) != cells.get(length):
            continue
        halves = [(item.interval_95[1] - item.interval_95[0]) / 2 for item in members]
        means.append(
            {
                "method": method,
                "reference": members[0].reference,
                "question": question,
                "length": length,
                "budget": round(float(np.mean([budget_of(item.row) for item in members]))),
                "tasks": len(members),
                "samples": min(item.contexts for item in members),  # a file may have fewer contexts than were asked for
                "score": round(float(np.mean([item.row["value"] for item in members])), 2),
                "comparable": round(float(np.mean([item.comparable for item in members])), 2),
                "difference": round(float(np.mean([item.difference for item in members])), 2),
                # Cells are independent: the variance of their mean is the mean of their variances over their number.
                "plus_minus": round(float(np.sqrt(np.sum(np.square(halves)))) / len(members), 2),
                "same": round(float(np.mean([item.same for item in members])), 1),
                **{name: round(float(np.mean([item.row[name] for item in members]))) for name in ACCOUNT},
                "no_effect": all(item.row["no_effect"] for item in members),
            }
        )
    found = shares(means, lambda mean: (mean["question"], mean["length"]), lambda mean: row_point(mean, "comparable"))
    return [{**mean, "of_oracle": share} for mean, share in zip(means, found, strict=True)]


ACCOUNT = (
    "attended_tokens", "length_tokens", "bytes_read_per_step", "full_bytes_read_per_step", "resident_bytes_per_row",
)  # fmt: skip


def _cell_names(members: Sequence[Compared]) -> list[tuple]:
    return [tuple(item.row.get(name) for name in CELL) for item in members]


def oracle_shares(compared: Sequence[Compared]) -> list[float | None]:
    """Compute the percent of the oracle's score with as many bytes, for each cell; see `experiments.evaluation.reachable`."""
    point = [row_point({**item.row, "value": item.comparable}) for item in compared]
    asked = [(*map(item.row.get, CELL), item.row["question"]) for item in compared]
    return shares(range(len(compared)), asked.__getitem__, point.__getitem__)


def flat_rows(compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """Make `flat` rows of all cells, each with ``of_oracle``, a percentage."""
    return [{**flat(item), "of_oracle": x and round(x, 1)} for item, x in zip(compared, oracle_shares(compared), strict=True)]


def flat(item: Compared) -> dict[str, Any]:
    """Make a row of plain values of a cell: the task, the method, its scores beside the reference's, and what it cost."""
    row, itself, against = item.row, item.is_reference, f"against_{item.reference.partition('(')[0]}"
    low, high = row["interval_95"]
    return {
        "task": row["name"],
        "length": row.get("length"),
        "depth": row.get("depth"),
        "question": row["question"],
        "title": method_title(row["method"].partition("(")[0]),
        "method": row["method"],
        "budget": budget_of(row),
        "score": row["value"],
        "score_low": low,
        "score_high": high,
        against: None if itself else item.difference,
        f"{against}_low": None if itself else item.interval_95[0],
        f"{against}_high": None if itself else item.interval_95[1],
        "same_answer": item.same,
        "examples": row.get("examples"),
        "contexts": item.contexts,
        "answer_tokens": row.get("mean_answer_tokens"),
        "unfinished": row.get("unfinished"),
        "tokens_attended": round(row["attended_tokens"]),
        "tokens": round(row["length_tokens"]),
        "bytes_read": round(row["bytes_read_per_step"]),
        "bytes_read_full": round(row["full_bytes_read_per_step"]),
        "bytes_resident": round(row["resident_bytes_per_row"]),
        "no_effect": without_effect(row),
        "seconds": row.get("seconds"),
        "knobs": row.get("knobs"),
    }
