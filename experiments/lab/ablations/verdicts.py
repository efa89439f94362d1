"""Judges claims by the rows of a record: paired differences with intervals, on tasks and by the distance."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.lab.ablations.claims import FULL, Claim, Comparison, Setting
from experiments.records import bootstrap_interval

YES, NO, OPEN = "yes", "no", "not resolved"
Metric = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on a claim by one instrument, tasks or distance.

    Attributes:
        holds: `YES`, `NO` or `OPEN`.
        differences: for each comparison, how much better the first rows are, and the ends of the 95 % interval; in points, or
            in nats.
        pairs: number of pairs of examples in all comparisons.
    """

    holds: str
    differences: tuple[tuple[float, float, float], ...]
    pairs: int


def judge(claim: Claim, metrics: Sequence[Metric], unit: str) -> Verdict | None:
    """Judge a claim by a record's rows.

    Args:
        claim: the claim.
        metrics: the cells of the claim's record.
        unit: "percent" (tasks: more is better) or "nats" (distance: less is better).

    Returns:
        The verdict; None if the rows are missing, or the claim leaves this instrument out.
    """
    mine = [
        m for m in metrics if m["unit"] == unit and m.get("table", "") == claim.table and "setting" in m and "scores" in m
    ]
    differences, states, pairs = [], [], 0
    for comparison in claim.comparisons:
        margin = comparison.points if unit == "percent" else comparison.nats
        if margin is None:
            return None
        values, groups = _differences(comparison, mine, unit)
        if not values:
            return None
        scale = 100.0 if unit == "percent" else 1.0
        low, high = (scale * end for end in _interval(values, groups, unit))
        differences.append((scale * float(np.mean(values)), low, high))
        states.append(_state(low, high, margin))
        pairs += len(values)
    holds = NO if NO in states else OPEN if OPEN in states else YES
    return Verdict(holds, tuple(differences), pairs)


def _interval(values: Sequence[float], groups: Sequence[str], unit: str) -> tuple[float, float]:
    """Compute the 95 % interval of the mean lead.

    Scores that all lead by the same have a bootstrap interval without width. Then the rule of three bounds how often another
    lead may occur that n examples did not show: in 3/n of all examples.
    """
    if unit == "percent" and len(set(values)) == 1:
        unseen = min(3 / len(set(groups)), 1.0)
        return max(values[0] - unseen, -1.0), min(values[0] + unseen, 1.0)
    return bootstrap_interval(values, groups)


def _state(low: float, high: float, margin: float) -> str:
    if low > -margin:
        return YES
    return NO if high < -margin else OPEN


def _differences(comparison: Comparison, metrics: Sequence[Metric], unit: str) -> tuple[list[float], list[str]]:
    """List the lead of the better rows, example by example, and the examples' names; equal names are resampled together."""
    values: list[float] = []
    groups: list[str] = []
    for first in metrics:
        if not _has(first["setting"], comparison.better) or _left_out(comparison, first, unit):
            continue
        for second in metrics:
            same_cell = all(first.get(name) == second.get(name) for name in ("name", "length", "samples", "model"))
            if not same_cell or not _partners(first["setting"], second["setting"], comparison):
                continue
            sign = 1.0 if unit == "percent" else -1.0
            values += [sign * (x - y) for x, y in zip(first["scores"], second["scores"], strict=True)]
            groups += [f"{first['name']}/{first.get('length')}/{index}" for index in range(len(first["scores"]))]
    return values, groups


def _left_out(comparison: Comparison, metric: Metric, unit: str) -> bool:
    return unit == "percent" and bool(comparison.tasks) and metric["name"] not in comparison.tasks


def _has(setting: Setting, wanted: Setting) -> bool:
    return all(setting.get(name) == value for name, value in wanted.items())


def _partners(first: Setting, second: Setting, comparison: Comparison) -> bool:
    """Tell whether two rows differ only in the compared setting; Full has no setting but its name."""
    if not _has(second, comparison.worse):
        return False
    if comparison.worse == FULL and "method" not in comparison.better:
        return True
    varied = comparison.better.keys() | comparison.worse.keys()
    rest = [{name: value for name, value in setting.items() if name not in varied} for setting in (first, second)]
    return rest[0] == rest[1]
