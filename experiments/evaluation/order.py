"""Do two models put the methods in the same order, on the cells that both models answered and that Full solves?"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from experiments.evaluation.comparison import BASELINE, Entry
from experiments.records import bootstrap_interval

COUNTED = 60.0  # percent; a task with a lower score of Full is in no mean of the main table
SOLVED = 85.0  # percent; cells with a lower score of Full do not count: there a method's loss is mixed with the model's own


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


def solved(entries: Sequence[Entry], least: float = SOLVED) -> list[tuple]:
    """Select the cells in which Full scores at least ``least`` percent, in the order of the rows."""
    return list(dict.fromkeys(e.cell for e in entries if e.row["method"] == BASELINE and e.row["value"] >= least))


def mean_scores(entries: Sequence[Entry], cells: Sequence[tuple]) -> dict[str, float]:
    """Average the scores of each method over the cells, for the methods that have all of the cells."""
    values: dict[str, dict[tuple, float]] = {}
    for entry in entries:
        if entry.cell in cells:
            values.setdefault(entry.row["method"], {}).setdefault(entry.cell, entry.row["value"])
    return {method: float(np.mean(list(x.values()))) for method, x in values.items() if len(x) == len(set(cells))}


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Compute Kendall's tau-b of two lists of scores of the same methods: 1 for the same order, -1 for the reverse.

    A pair that ties in a list counts neither for nor against. NaN if a list has only ties.

    Raises:
        ValueError: the lists differ in length.
    """
    if len(first) != len(second):
        raise ValueError(f"Kendall's tau needs two scores for each method, got {len(first)} and {len(second)}")
    upper = np.triu_indices(len(first), 1)
    signs = [np.sign(np.subtract.outer(scores, scores))[upper] for scores in (first, second)]
    pairs = np.sqrt(np.prod([np.count_nonzero(sign) for sign in signs], dtype=np.float64))
    return float(signs[0] @ signs[1] / pairs) if pairs else float("nan")


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


def changes(first: Sequence[Entry], second: Sequence[Entry], cells: Sequence[tuple]) -> list[Change]:
    """List the pairs of methods whose order differs between two models, pairs beyond noise first.

    Args:
        first: rows of one model, see `experiments.evaluation.comparison.load`.
        second: rows of the other model.
        cells: cells that both models have.
    """
    scores = mean_scores(first, cells), mean_scores(second, cells)

    def gaps(better: str, worse: str) -> tuple[Difference, Difference]:
        return difference(first, better, worse, cells), difference(second, better, worse, cells)

    return changed_places(*scores, gaps)


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
