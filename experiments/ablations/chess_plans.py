"""Ablations of CHESS: budget, trigger, page vectors and other readings of its paper."""

from __future__ import annotations

from typing import Any

from experiments.ablations.arms import WRITTEN, WRITTEN_TASK, Lab, Methods, Table, table
from experiments.answering import Calibration, chess_thresholds
from kvjax.method import Method

NEVER = 10**6  # pages; an interval that no text reaches
# Shares of grids, chunks and pages whose products are the budgets of the paper's table.
CHESS_BUDGETS = {
    73: (0.9, 0.9, 0.9),
    57: (0.9, 0.8, 0.79),
    50: (0.9, 0.8, 0.7),
    40: (0.8, 0.7, 0.7),
    28: (0.8, 0.7, 0.5),
    21: (0.7, 0.6, 0.5),
    9: (0.6, 0.5, 0.3),
    1: (0.5, 0.2, 0.1),
}
# Readings of the paper where it is silent: first one at a time, then joined.
_BEST = {"page_vec_rope": "pre", "centred": True, "candidates": "history"}
READINGS: dict[str, dict[str, Any]] = {
    "centred scores": {"centred": True},
    "sinks and window not ranked": {"candidates": "history"},
    "anchor of 2 pages": {"anchor_pages": 2},
    "no grids and chunks": {"hierarchy": False},
    "a new list every step": {"trigger": "step"},
    "all pages until the first trigger": {"first_selection": "trigger"},
    "centred scores, keys before rotation": {"centred": True, "page_vec_rope": "pre"},
    "both, sinks and window not ranked": _BEST,
    "the three, anchor of 2 pages": {**_BEST, "anchor_pages": 2},
    "the three, no grids and chunks": {**_BEST, "hierarchy": False},
    "all of them": {**_BEST, "anchor_pages": 2, "hierarchy": False},
}
_TASKS = ("niah_single_2", "niah_multikey_2", "niah_multivalue")


def chess(lab: Lab) -> list[Table]:
    """Compare CHESS's budgets, the triggers that rebuild its page list, the vectors of pages, and readings of the paper."""
    tasks = lab.pick(*_TASKS)
    calibration = Calibration((WRITTEN_TASK,), lab.length, lab.calibration_prompts, lab.new_tokens, lab.seed)
    thresholds = chess_thresholds(lab.base, calibration, lab.results, lab.reading)

    def make(budget: int, **knobs: Any) -> Method:
        return lab.method("chess", ratios=CHESS_BUDGETS[budget], capacity=CHESS_BUDGETS[73], **thresholds, **knobs)

    budgets: Methods = {
        f"{budget} % = {' x '.join(map(str, ratios))}": ({"budget": budget}, make(budget, trigger="fixed"))
        for budget, ratios in CHESS_BUDGETS.items()
    }
    first = (
        "Product of the shares of grids, chunks and pages; sink and window pages come on top. Rebuilt every 6 pages."
    )
    triggers: Methods = {}
    for budget in (1, 40):
        for trigger, name, knobs in (
            ("and", "and", {}),
            ("or", "or", {}),
            ("fixed", "every 6 pages", {}),
            ("fixed", "never", {"interval": NEVER}),
        ):
            setting = {"trigger": name, "budget": budget}
            triggers[f"{name}, {budget} %"] = (setting, make(budget, trigger=trigger, **knobs))
    second = (
        f"Along {lab.new_tokens} tokens that Full wrote from {WRITTEN_TASK} prompts (past the answer it goes on). "
        f"Thresholds: 99th percentiles over pages of other prompts, entropy {thresholds['tau_entropy']:.3f} nats, variance "
        f"{thresholds['tau_varentropy']:.3f}."
    )
    vectors: Methods = {}
    for budget in (9, 40):
        for name, knobs in (
            ("mean of rotated keys", {}),
            ("mean of keys before rotation", {"page_vec_rope": "pre"}),
            ("every head's part of length 1", {"normalize": True}),
        ):
            vectors[f"{name}, {budget} %"] = (
                {"vector": name, "budget": budget},
                make(budget, trigger="fixed", **knobs),
            )
    third = "What represents a page; the paper does not say whether its keys are rotated. Rebuilt every 6 pages."
    readings: Methods = {}
    for budget in (9, 40):
        for name, knobs in READINGS.items():
            setting = {"reading": name, "budget": budget}
            readings[f"{name}, {budget} %"] = (setting, make(budget, **{"trigger": "fixed", **knobs}))
    fourth = (
        "What the paper does not say, read otherwise: one point at a time, then several. Rebuilt every 6 pages, except "
        "in the row of every step. Where sinks and window are not ranked, they come on top."
    )
    return [
        table(lab, "CHESS: budget", first, tasks, budgets),
        table(lab, "CHESS: when the page list is rebuilt", second, (), triggers, (WRITTEN,)),
        table(lab, "CHESS: page vectors", third, tasks, vectors),
        table(lab, "CHESS: readings", fourth, tasks, readings),
    ]
