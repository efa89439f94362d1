"""The ablations by name. Traced knobs vary under a fixed capacity, so that a table needs few compilations."""

from __future__ import annotations

from collections.abc import Callable

from experiments.lab.ablations.arms import Lab, Table
from experiments.lab.ablations.chess_plans import chess
from experiments.lab.ablations.mosaickv_plans import channels, strategy
from experiments.lab.ablations.pariskv_plans import hashing
from experiments.lab.ablations.sentencekv_plans import sentences
from experiments.lab.ablations.tokenselect_plans import chunk, extrapolate, theta, votes

# The longest ablations stand first, so that processes end together.
ABLATIONS: dict[str, Callable[[Lab], list[Table]]] = {
    plan.__name__: plan for plan in (strategy, extrapolate, channels, chess, sentences, votes, theta, chunk, hashing)
}

DRIFT = "drift"  # cluster_drift.py, whose record has no tables
NAMES = (*ABLATIONS, DRIFT)
