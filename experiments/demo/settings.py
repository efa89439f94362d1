"""The settings of a demo, and the methods and budgets that follow from them."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from experiments.answering import MeshSettings, budget_tokens, paper_method, resolve_question
from experiments.cli import option
from experiments.tasks import get_task
from kvjax import registry
from kvjax.cache.quantised import KV_DTYPES
from kvjax.protocol.method import Method

_KNOBS = {"chess": {"trigger": "fixed"}}  # CHESS' other triggers need thresholds, which a demo does not calibrate
_QUESTIONS = ("auto", "prefill", "extend")
_BUDGETS = ("1/8", "1/4")
_SLOW_BUDGETS = ("1/4",)
_SLOW_PARAMETERS = 50_000_000  # a CPU takes minutes for larger models, most of the time to compile


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoSettings(MeshSettings):
    """The settings of a demo.

    Attributes:
        length: tokens of context, questions and answers
        samples: contexts per task
        questions: questions per context; more questions bring more needles
        budgets: comma-separated shares of the length or numbers of tokens (default: 1/8,1/4; on a CPU 1/4 alone for models
            of more than 50M parameters, which take half a minute for each method and budget)
        methods: comma-separated names, package.module:Class, or wrappers such as twilight(quest); Full is always run first
        tasks: comma-separated task names
        haystack: 'prose' (Python's documentation), 'code' (its library), 'noise' or file:PATH
        question: where the question stands: in the prompt that is compressed (prefill), after it (extend), or (auto) in the
            prompt only for methods that choose by the prompt's last queries
        template: auto uses the checkpoint's chat template, if it has one; none does not
        seed: seed of the contexts
        kv_dtype: store keys and values as codes: int8, float8_e4m3fn, k8v4 or int4 (default: in the dtype of computation)

    Raises:
        ValueError: a number below 1, an unknown task or method, or an unreadable budget.
    """

    length: int = 2048
    samples: int = 2
    questions: int = 5
    budgets: tuple[str, ...] = option((), flag="budget")
    methods: tuple[str, ...] = ("streamingllm", "snapkv", "h2o", "keydiff", "quest")
    tasks: tuple[str, ...] = ("niah_single_2",)
    haystack: str = "prose"
    question: str = option("auto", choices=_QUESTIONS)
    template: str = option("auto", choices=("auto", "none"))
    seed: int = 0
    kv_dtype: str | None = option(None, choices=tuple(KV_DTYPES))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("length", "samples", "questions"):
            if (value := vars(self)[name]) < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        for name in self.tasks:
            get_task(name)
        runs(self)


@dataclasses.dataclass(frozen=True)
class DemoOutput:
    """The output of a demo.

    Attributes:
        out: directory for demo.json and demo.png
        plot: write the PNG (needs matplotlib)
        json: print a JSON line instead of the table
        quiet: show no progress bar
    """

    out: pathlib.Path = pathlib.Path("runs/demo")
    plot: bool = True
    json: bool = False
    quiet: bool = False

    @property
    def files(self) -> list[pathlib.Path]:
        """The files that are written: the record, then the figure."""
        return [self.out / "demo.json", self.out / "demo.png"][: 1 + self.plot]


@dataclasses.dataclass(frozen=True)
class Run:
    """A row of the table.

    Attributes:
        name: the method's name.
        share: the budget as it was given, "" without a budget.
        budget: the budget in tokens; None without a budget.
        method: the method.
        question: place of the question, "prefill" or "extend".
    """

    name: str
    share: str
    budget: int | None
    method: Method
    question: str


def runs(settings: DemoSettings, tokenizer: Any = None, vocab_size: int | None = None) -> list[Run]:
    """List the rows of the table: Full, then every method at every budget.

    Args:
        settings: what to run.
        tokenizer: the model's tokenizer, for methods that need one; without it such a method is made but cannot run.
        vocab_size: entries of the model's vocabulary.

    Raises:
        ValueError: an unknown method, a budget that is no share and no number of tokens, or a budget that the method refuses.
    """

    def make(name: str, share: str, budget: int | None) -> Run:
        knobs = _KNOBS.get(name, {}) if budget is None else {"budget": budget}
        method = registry.make(name, tokenizer, vocab_size, **knobs)
        return Run(name, share, budget, method, resolve_question(method, settings.question))

    made = [make("full", "", None)]
    for name in dict.fromkeys(map(registry.canonical_name, settings.methods)):
        cls = registry.find(name)
        if name == "full":
            continue
        if "(" in name:  # what it is made of has its own budgets
            method = paper_method(name, settings.length, tokenizer=tokenizer, config=None).method
            made.append(Run(name, "", None, method, resolve_question(method, settings.question)))
            continue
        if "budget" not in [knob.name for knob in registry.knobs(cls)]:
            made.append(make(name, "", None))
            continue
        shares = settings.budgets or _BUDGETS
        made += [make(name, share.strip(), budget_tokens(share, settings.length)) for share in shares]
    return made


def with_budgets(settings: DemoSettings, parameters: int, platform: str) -> DemoSettings:
    """Fill in the budgets that are run.

    Args:
        settings: the settings; if they have no budgets, budgets that suit the model's size are chosen.
        parameters: number of the model's parameters.
        platform: JAX's platform, such as "cpu".
    """
    slow = platform == "cpu" and parameters > _SLOW_PARAMETERS
    return dataclasses.replace(settings, budgets=settings.budgets or (_SLOW_BUDGETS if slow else _BUDGETS))
