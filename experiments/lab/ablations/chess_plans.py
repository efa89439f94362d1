"""Ablations of CHESS: budget, trigger, and readings of its paper."""

from __future__ import annotations

from typing import Any

from experiments.answering import Calibration, chess_thresholds
from experiments.lab.ablations.arms import WRITTEN, WRITTEN_TASK, Lab, Methods, Table, table
from kvjax.methods.chess.method import PRINTED
from kvjax.protocol.method import Method

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
# Readings where the paper is silent: the default and one point changed at a time, then the printed form and one more point.
READINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "keys after rotation": {"page_vec_rope": "post"},
    "scores not centred": {"centred": False},
    "sinks and window ranked": {"candidates": "all"},
    "the window as anchor": {"anchor_pages": None},
    "no grids and chunks": {"hierarchy": False},
    "as printed": PRINTED,
    "as printed, keys before rotation": {**PRINTED, "page_vec_rope": "pre"},
    "as printed, centred scores": {**PRINTED, "centred": True},
    "as printed, sinks and window not ranked": {**PRINTED, "candidates": "history"},
    "as printed, anchor of 2 pages": {**PRINTED, "anchor_pages": 2},
    "as printed, no grids and chunks": {**PRINTED, "hierarchy": False},
}
_TASKS = ("niah_single_2", "niah_multikey_2", "niah_multivalue")


def chess(lab: Lab) -> list[Table]:
    """Compare CHESS's budgets, the triggers that rebuild its page list, and readings of the paper."""
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
    readings: Methods = {}
    for budget in (9, 40):
        for name, knobs in READINGS.items():
            setting = {"reading": name, "budget": budget}
            readings[f"{name}, {budget} %"] = (setting, make(budget, **{"trigger": "fixed", **knobs}))
    third = (
        "What the paper does not say, read otherwise: one point of the default at a time, then the printed form and one "
        "more point. Rebuilt every 6 pages. Where sinks and window are not ranked, they come on top."
    )
    return [
        table(lab, "CHESS: budget", first, tasks, budgets),
        table(lab, "CHESS: when the page list is rebuilt", second, (), triggers, (WRITTEN,)),
        table(lab, "CHESS: readings", third, tasks, readings),
    ]
