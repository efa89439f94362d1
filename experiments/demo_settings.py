"""What a demo runs: its settings, and the methods and budgets they stand for."""

from __future__ import annotations

import dataclasses

from experiments.tasks import get_task
from kvjax import registry
from kvjax.method import Method

QUESTION_PLACES = ("auto", "prefill", "extend")


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


def runs(settings: Settings) -> list[Run]:
    """Full, then every method at every budget.

    Raises:
        ValueError: unknown method, or a budget that is no share or number or that the method refuses.
    """
    made = [_make_run("full", "", None, settings)]
    for name in dict.fromkeys(name.strip().lower() for name in settings.methods):
        cls = type(registry.make(name))
        if name == "full":
            continue
        if "budget" not in [knob.name for knob in registry.knobs(cls)]:
            made.append(_make_run(name, "", None, settings))
            continue
        made += [
            _make_run(name, share.strip(), _tokens(share, settings.length), settings) for share in settings.budgets
        ]
    return made


def _make_run(name: str, share: str, budget: int | None, settings: Settings) -> Run:
    method = registry.make(name, **({} if budget is None else {"budget": budget}))
    place = settings.question
    if place == "auto":
        place = "prefill" if method.chooses_slots and method.obs_window > 0 else "extend"
    return Run(name, share, budget, method, place)


def _tokens(share: str, length: int) -> int:
    """``1/8`` or ``0.125`` of the length, or a number of tokens."""
    top, _, bottom = share.strip().partition("/")
    try:
        value = float(top) / float(bottom or 1)
    except (ValueError, ZeroDivisionError):
        value = -1.0
    if not (0 < value <= 1 or (value > 1 and value == int(value) and not bottom)):
        raise ValueError(f"a budget is a share such as 1/8 or a number of tokens such as 256, got {share!r}")
    return round(value * length) if bottom or value < 1 else int(value)
