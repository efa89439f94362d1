"""What a demo runs: its settings, and the methods and budgets they stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.answering.presets import QUESTION_PLACES, budget_tokens, question_place
from experiments.tasks import get_task
from kvjax import registry
from kvjax.method import Method

_KNOBS = {"chess": {"trigger": "fixed"}}  # its other triggers need thresholds, which nothing here calibrates


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run; see `python -m kvjax demo --help`.

    Raises:
        ValueError: a number below 1, an unknown task, method or question place, or an unreadable budget.
    """

    length: int = 2048
    samples: int = 2
    questions: int = 5
    budgets: tuple[str, ...] = ("1/8", "1/4")
    methods: tuple[str, ...] = ("streamingllm", "snapkv", "h2o", "keydiff", "quest")
    tasks: tuple[str, ...] = ("niah_single_2",)
    haystack: str = "prose"
    question: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("length", "samples", "questions"):
            if (value := vars(self)[name]) < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.question not in QUESTION_PLACES:
            raise ValueError(f"question must be one of {QUESTION_PLACES}, got {self.question!r}")
        for name in self.tasks:
            get_task(name)
        runs(self)


@dataclasses.dataclass(frozen=True)
class Run:
    """One row of the table."""

    name: str  # method name
    share: str  # budget as it was given, "" for Full
    budget: int | None  # tokens
    method: Method
    question: str  # "prefill" or "extend"


def runs(settings: Settings, tokenizer: Any = None, vocab_size: int | None = None) -> list[Run]:
    """Full, then every method at every budget.

    Args:
        settings: what to run.
        tokenizer: the model's, for methods that read text; without one they are made, but cannot run.
        vocab_size: entries of the model's vocabulary.

    Raises:
        ValueError: unknown method, or a budget that is no share or number or that the method refuses.
    """

    def make(name: str, share: str, budget: int | None) -> Run:
        knobs = _KNOBS.get(name, {}) if budget is None else {"budget": budget}
        method = registry.make(name, tokenizer, vocab_size, **knobs)
        return Run(name, share, budget, method, question_place(method, settings.question))

    made = [make("full", "", None)]
    for name in dict.fromkeys(name.strip().lower() for name in settings.methods):
        cls = type(registry.make(name))
        if name == "full":
            continue
        if "budget" not in [knob.name for knob in registry.knobs(cls)]:
            made.append(make(name, "", None))
            continue
        made += [make(name, share.strip(), budget_tokens(share, settings.length)) for share in settings.budgets]
    return made
