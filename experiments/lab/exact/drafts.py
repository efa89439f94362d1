"""The drafts of a run, at their budgets: which can draft, and which budgets share a compiled program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import kvjax
from experiments.answering import LoadedModel, needs_thresholds
from experiments.evaluation import Choice
from experiments.lab.exact.settings import ExactSettings
from experiments.lab.fidelity import shared_room
from experiments.records import knobs_of
from kvjax.protocol.method import Method


@dataclasses.dataclass(frozen=True)
class Draft:
    """A draft at a budget and a length.

    Attributes:
        label: the name in tables.
        name: the method's name.
        method: the method, with room for the largest budget of its name.
        knobs: the method's own knobs, without that room.
        at: which of its budgets this is.
    """

    label: str
    name: str
    method: Method
    knobs: dict[str, Any]
    at: int


def make_drafts(model: LoadedModel, settings: ExactSettings, length: int, say: Callable[[str], None]) -> list[Draft]:
    """Make the drafts of the settings at a length; say which of them `kvjax.Verified` refuses, and leave these out."""
    made: dict[str, list[tuple[Choice, Method, Method]]] = {}
    for choice in settings.drafts:
        # Thresholds of CHESS would have to be calibrated; this trigger has none.
        extra = {"trigger": "fixed"} if needs_thresholds(choice.name, choice.knobs) else {}

        def at(choice: Choice = choice, **more: Any) -> Method:
            return choice.at(length, model.tokenizer, model.config, {**extra, **more}).method  # noqa: B023

        try:
            own = at()
            kvjax.Verified(draft=own, depth=max(settings.depths)).for_layer(0, model.config.num_layers)
        except ValueError as error:
            say(f"{choice.label} is left out: {error}")
            continue
        made.setdefault(choice.name, []).append((choice, own, own))
    drafts = []
    for name, mine in made.items():
        room = shared_room([own for _, own, _ in mine], length)
        for index, (choice, own, _) in enumerate(mine):
            wide = own
            if room is not None and "capacity" not in choice.knobs and not isinstance(vars(own)["capacity"], tuple):
                wide = dataclasses.replace(own, capacity=max(room, vars(own)["capacity"]))
            drafts.append(Draft(choice.label, name, wide, knobs_of(own), index))
    return drafts
