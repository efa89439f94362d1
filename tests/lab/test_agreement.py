"""The orders of methods under two models, worked out by hand."""

from __future__ import annotations

import pathlib

import pytest

from experiments.evaluation.comparison import Entry
from experiments.lab.agreement import agreement


def cells(full=100.0, **scores):
    """One task of four samples: the right ones of each method."""
    entries = {"full": full / 100, **scores}
    rows, groups = {}, {key: str(key) for key in range(4)}
    for name, share in entries.items():
        scores = {key: float(key < 4 * share) for key in groups}
        rows[name] = Entry(pathlib.Path(), {"value": 100 * share}, scores, {}, groups)
    return {"vt": rows}


def test_orders_are_compared_and_ties_are_no_change():
    both = agreement(cells(a=1.0, b=0.5, c=0.0), cells(a=0.0, b=0.5, c=0.5, d=1.0), 50)
    assert (both.tasks, both.methods) == (["vt"], ["a", "b", "c"])
    assert both.tau == pytest.approx(-2 / (3 * 2) ** 0.5)  # two pairs discordant, one tied: tau-b
    assert [change[:2] for change in both.changes] == [("a", "c"), ("a", "b")]
    (mean, half), (later, _) = both.changes[0][2:]
    assert (mean, half, later) == (100.0, 0.0, -50.0)


def test_a_task_that_full_does_not_solve_does_not_count():
    with pytest.raises(ValueError, match="at least 90"):
        agreement(cells(a=1.0), cells(full=80.0, a=1.0), 90)
