"""Do models put the methods in the same order? `python -m experiments.lab.agreement FOLDER FOLDER ...`.

Each result folder stands for a model. Two models are compared by the methods' mean scores over the tasks that Full solves
under both, each at its own shortest length, so lengths and numbers of samples may differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Sequence

import numpy as np
from scipy import stats

from experiments.cli import Job, option, read_record
from experiments.evaluation.comparison import BASELINE, COUNTED, Entry, load
from experiments.records import bootstrap_interval, markdown_rows
from kvjax import registry

_HEAD = ("model", "model", "methods", "tasks", "Kendall's tau", "pairs that change places", "beyond noise")
Cells = dict[str, dict[str, Entry]]  # by task and method


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgreementCommand:
    """Which models are compared.

    Attributes:
        folders: result folders of eval, one for each model
        least: the least score of Full, in percent, with which a task counts
    """

    folders: tuple[pathlib.Path, ...] = option(positional=True)
    least: float = COUNTED


def _at_shortest(folder: pathlib.Path) -> Cells:
    """Read a folder's rows of methods at their own settings with the question in the prompt, by task and method."""
    known = registry.builtin()
    entries = load([folder])
    mine = [x for x in entries if x.row["question"] == "prefill" and x.row["method"] in known and x.row["length"]]
    if not mine:
        raise ValueError(f"{folder} has no row with the question in the prompt")
    shortest = min(x.row["length"] for x in mine)
    by_task: Cells = {}
    for entry in mine:
        if entry.row["length"] == shortest:
            by_task.setdefault(entry.row["name"], {}).setdefault(entry.row["method"], entry)
    return by_task


def difference(one: Sequence[Entry], other: Sequence[Entry]) -> tuple[float, float]:
    """Compute the mean of one method's scores less another's over some cells, which are independent.

    Returns:
        The mean in points, and half of its 95 % interval: a paired bootstrap over the examples of each cell.
    """
    means, halves = [], []
    for a, b in zip(one, other, strict=True):
        keys = list(a.scores)
        points = 100 * np.asarray([a.scores[key] - b.scores[key] for key in keys])
        low, high = bootstrap_interval(points, [a.groups[key] for key in keys])
        means.append(points.mean())
        halves.append((high - low) / 2)
    return float(np.mean(means)), float(np.sqrt(np.sum(np.square(halves)))) / len(means)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The orders of methods under two models.

    Attributes:
        tasks: the tasks that count.
        methods: the methods that both models have on all of them, Full left out.
        tau: Kendall's tau-b of the two orders.
        changes: the pairs that change places: the method that is better under the first model, the one that is worse, and
            their `difference` under each model; the largest first.
    """

    tasks: list[str]
    methods: list[str]
    tau: float
    changes: list[tuple[str, str, tuple[float, float], tuple[float, float]]]


def agreement(first: Cells, second: Cells, least: float) -> Agreement:
    """Compare the orders of methods under two models on the tasks where Full scores ``least`` percent.

    Raises:
        ValueError: there is no such task.
    """
    models = (first, second)
    tasks = [x for x in first if x in second and all(_score(cells, x, BASELINE) >= least for cells in models)]
    if not tasks:
        raise ValueError(f"expected a task with a score of Full of at least {least:g} under both models, got none")
    methods = [x for x in first[tasks[0]] if all(x in cells[task] for cells in models for task in tasks)]
    methods.remove(BASELINE)
    means = [[float(np.mean([_score(cells, x, name) for x in tasks])) for name in methods] for cells in models]
    changes = []
    for (x, *before), (y, *after) in itertools.combinations(zip(methods, *means, strict=True), 2):
        if (before[0] - after[0]) * (before[1] - after[1]) < 0:
            better, worse = (x, y) if before[0] > after[0] else (y, x)
            gaps = (difference(*([cells[task][name] for task in tasks] for name in (better, worse))) for cells in models)
            changes.append((better, worse, *gaps))
    changes.sort(key=lambda change: -change[2][0])
    return Agreement(tasks, methods, float(stats.kendalltau(*means).statistic), changes)


def _score(cells: Cells, task: str, method: str) -> float:
    entry = cells[task].get(method)
    return -1.0 if entry is None else entry.row["value"]


def _show(command: AgreementCommand) -> None:
    if len(command.folders) < 2:
        raise ValueError(f"expected at least two result folders, got {len(command.folders)}")
    models = {f"{read_record(x)['settings']['model']} ({x.name})": _at_shortest(x) for x in command.folders}
    rows, lines = [], []
    for (one, first), (other, second) in itertools.combinations(models.items(), 2):
        both = agreement(first, second, command.least)
        beyond = [change for change in both.changes if all(abs(mean) > half for mean, half in change[2:])]
        count = len(both.methods)
        changed = f"{len(both.changes)} of {count * (count - 1) // 2}"
        rows.append((one, other, count, ", ".join(both.tasks), f"{both.tau:.2f}", changed, len(beyond)))
        for better, worse, (mean, half), (later, wide) in beyond:
            lines.append(
                f"* {better} less {worse}: {mean:+.1f} ± {half:.1f} under {one}, {later:+.1f} ± {wide:.1f} under {other}."
            )
    print("\n".join([*markdown_rows([_HEAD, *rows]), *([""] if lines else []), *lines]))


main = Job(_show, AgreementCommand)


if __name__ == "__main__":
    sys.exit(main())
