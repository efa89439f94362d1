"""Do models put the methods in the same order? `python -m experiments.lab.agreement FOLDER FOLDER ...`.

Each result folder stands for a model. Two models are compared on the tasks that Full solves under both, each at its own
shortest length, so lengths and numbers of samples may differ.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import stats

from experiments.cli import Job, option, read_record
from experiments.evaluation.comparison import BASELINE, COUNTED, Entry, load
from experiments.records import bootstrap_interval, markdown_rows
from kvjax import registry


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgreementCommand:
    """Which models are compared.

    Attributes:
        folders: result folders of eval, one for each model
        least: the least score of Full, in percent, with which a task counts
    """

    folders: tuple[pathlib.Path, ...] = option(positional=True)
    least: float = COUNTED


@dataclasses.dataclass(frozen=True)
class Difference:
    """The mean difference of two methods over cells.

    Attributes:
        mean: the mean difference, in points of the score.
        plus_minus: half of the mean's 95 % interval, paired bootstrap over the examples of each cell; cells are independent.
    """

    mean: float
    plus_minus: float

    @property
    def beyond_noise(self) -> bool:
        """Whether the interval leaves out zero."""
        return abs(self.mean) > self.plus_minus


@dataclasses.dataclass(frozen=True)
class Change:
    """Two methods that change places.

    Attributes:
        better: the method that scores higher on the first model.
        worse: the method that scores lower on the first model.
        first: `better` less `worse` on the first model.
        second: `better` less `worse` on the second model.
    """

    better: str
    worse: str
    first: Difference
    second: Difference

    @property
    def beyond_noise(self) -> bool:
        """Whether both intervals leave out zero."""
        return self.first.beyond_noise and self.second.beyond_noise


@dataclasses.dataclass(frozen=True)
class Agreement:
    """The orders of methods under two models.

    Attributes:
        tasks: the tasks that count.
        methods: the methods that both models have, Full left out.
        tau: Kendall's tau-b of the two orders.
        changes: the pairs of methods that change places, pairs beyond noise first.
    """

    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    tau: float
    changes: tuple[Change, ...]


def agreement(first: Sequence[Entry], second: Sequence[Entry], least: float = COUNTED) -> Agreement:
    """Compare the orders of methods at their own settings under two models, by mean scores over the tasks that count.

    Args:
        first: rows of one model, see `experiments.evaluation.comparison.load`.
        second: rows of the other model.
        least: the least score of Full, in percent, with which a task counts.

    Raises:
        ValueError: Full solves no task under both models, or a model has no row with the question in the prompt.
    """
    rows = [_at_shortest(entries) for entries in (first, second)]
    full = [{x.row["name"]: x for x in mine if x.row["method"] == BASELINE} for mine in rows]
    solved = [{name for name, x in mine.items() if x.row["value"] >= least} for mine in full]
    tasks = tuple(name for name in full[0] if name in solved[0] & solved[1])
    if not tasks:
        raise ValueError(f"expected a task with a score of Full of at least {least:g} under both models, got none")
    cells = [[mine[name].cell for name in tasks] for mine in full]
    scores = [
        mean_scores([x for x in mine if x.row["method"] != BASELINE], at) for mine, at in zip(rows, cells, strict=True)
    ]
    methods = tuple(name for name in scores[0] if name in scores[1])

    def gaps(better: str, worse: str) -> tuple:
        return tuple(difference(mine, better, worse, at) for mine, at in zip(rows, cells, strict=True))

    tau = float(stats.kendalltau(*([mine[name] for name in methods] for mine in scores)).statistic)
    return Agreement(tasks, methods, tau, tuple(changed_places(*scores, gaps)))


def mean_scores(entries: Sequence[Entry], cells: Sequence[tuple]) -> dict[str, float]:
    """Average the scores of each method over the cells, for the methods that have all of the cells."""
    values: dict[str, dict[tuple, float]] = {}
    for entry in entries:
        if entry.cell in cells:
            values.setdefault(entry.row["method"], {}).setdefault(entry.cell, entry.row["value"])
    return {method: float(np.mean(list(x.values()))) for method, x in values.items() if len(x) == len(set(cells))}


def difference(entries: Sequence[Entry], one: str, other: str, cells: Sequence[tuple]) -> Difference:
    """Compute the mean of ``one`` less ``other`` over cells that both methods have."""
    by_key = {(entry.row["method"], entry.cell): entry for entry in reversed(entries)}
    means, halves = [], []
    for cell in cells:
        a, b = by_key[one, cell], by_key[other, cell]
        keys = list(a.scores)
        points = 100 * np.asarray([a.scores[key] - b.scores[key] for key in keys])
        low, high = bootstrap_interval(points, [a.groups[key] for key in keys])
        means.append(points.mean())
        halves.append((high - low) / 2)
    return Difference(float(np.mean(means)), float(np.sqrt(np.sum(np.square(halves)))) / len(cells))


def changed_places(
    first: Mapping[str, float],
    second: Mapping[str, float],
    gaps: Callable[[str, str], tuple[Difference, Difference]],
) -> list[Change]:
    """List the pairs of names whose order differs between two lists of scores, pairs beyond noise first.

    A tie in a list is no change of order.

    Args:
        first: scores by name.
        second: scores by name; only names that both lists have are compared.
        gaps: returns, for the better and the worse name of ``first``, the better less the worse in each list.
    """
    made = []
    for pair in itertools.combinations([name for name in first if name in second], 2):
        better, worse = sorted(pair, key=lambda name: -first[name])
        if first[better] > first[worse] and second[better] < second[worse]:
            made.append(Change(better, worse, *gaps(better, worse)))
    return sorted(made, key=lambda change: (not change.beyond_noise, -change.first.mean))


def _at_shortest(entries: Sequence[Entry]) -> list[Entry]:
    """Select the rows of methods at their own settings, at the shortest length, with the question in the prompt."""
    known = registry.builtin()
    mine = [x for x in entries if x.row["question"] == "prefill" and x.row["method"] in known and x.row["length"]]
    if not mine:
        raise ValueError("expected rows with the question in the prompt, got none")
    shortest = min(x.row["length"] for x in mine)
    return [x for x in mine if x.row["length"] == shortest]


def _show(command: AgreementCommand) -> None:
    if len(command.folders) < 2:
        raise ValueError(f"expected at least two result folders, got {len(command.folders)}")
    loaded = {folder: load([folder]) for folder in command.folders}
    names = {folder: f"{read_record(folder)['settings']['model']} ({folder.name})" for folder in loaded}
    rows, told = [], []
    for one, other in itertools.combinations(loaded, 2):
        found = agreement(loaded[one], loaded[other], command.least)
        beyond = [change for change in found.changes if change.beyond_noise]
        pairs = len(found.methods) * (len(found.methods) - 1) // 2
        changed = f"{len(found.changes)} of {pairs}"
        rows.append(
            (
                names[one],
                names[other],
                str(len(found.methods)),
                ", ".join(found.tasks),
                f"{found.tau:.2f}",
                changed,
                str(len(beyond)),
            )
        )
        told += [
            f"* {x.better} less {x.worse}: {x.first.mean:+.1f} ± {x.first.plus_minus:.1f} under {names[one]}, "
            f"{x.second.mean:+.1f} ± {x.second.plus_minus:.1f} under {names[other]}."
            for x in beyond
        ]
    head = ("model", "model", "methods", "tasks", "Kendall's tau", "pairs that change places", "beyond noise")
    print("\n".join([*markdown_rows([head, *rows]), *([""] if told else []), *told]))


main = Job(_show, AgreementCommand)


if __name__ == "__main__":
    sys.exit(main())
