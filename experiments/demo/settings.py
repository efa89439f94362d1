"""The settings of a demo, which is an evaluation of a few contexts that fits a CPU."""

from __future__ import annotations

import dataclasses
import pathlib

from jsonargparse.typing import PositiveInt

from experiments.answering import MeshSettings
from experiments.cli import option
from experiments.evaluation import Choice, EvaluationSettings, Shown, choices_of
from kvjax.cache.quantised import KV_DTYPES

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
        ValueError: a number below 1, an unknown task or method, or a budget that a method refuses.
    """

    length: PositiveInt = 2048
    samples: PositiveInt = 2
    questions: PositiveInt = 5
    budgets: tuple[str, ...] = option((), flag="budget")
    methods: tuple[str, ...] = ("streamingllm", "snapkv", "h2o", "keydiff", "quest")
    tasks: tuple[str, ...] = ("niah_single_2",)
    haystack: str = "prose"
    question: str = option("auto", choices=("auto", "prefill", "extend"))
    template: str = option("auto", choices=("auto", "none"))
    seed: int = 0
    kv_dtype: str | None = option(None, choices=tuple(KV_DTYPES))

    def __post_init__(self) -> None:
        super().__post_init__()
        for choice in self.evaluation().choices:  # before a model is loaded
            choice.at(self.length, None, None, {})

    def evaluation(self, parameters: int = 0, platform: str = "") -> EvaluationSettings:
        """Make the settings of the evaluation; without budgets, with those that suit the model's size.

        Args:
            parameters: number of the model's parameters.
            platform: JAX's platform, such as "cpu".
        """
        slow = platform == "cpu" and parameters > _SLOW_PARAMETERS
        names = ("tasks", "samples", "questions", "question", "template", "seed", "kv_dtype")
        return EvaluationSettings(
            **{field.name: vars(self)[field.name] for field in dataclasses.fields(MeshSettings)},
            **{name: vars(self)[name] for name in names},
            lengths=(self.length,),
            haystack=(self.haystack,),
            budgets=self.budgets or (_SLOW_BUDGETS if slow else _BUDGETS),
            # CHESS' other triggers need thresholds, whose calibration takes longer than a demo.
            methods=tuple(
                Choice(choice.name, {"trigger": "fixed"}) if choice.name == "chess" else choice
                for choice in choices_of(self.methods)
            ),
            workers=0,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoOutput(Shown):
    """The output of a demo.

    Attributes:
        out: directory for demo.json and demo.png

    Raises:
        ValueError: the directory is a file.
    """

    out: pathlib.Path = pathlib.Path("runs/demo")

    def __post_init__(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"--out must be a directory, got the file {self.out}")

    @property
    def files(self) -> list[pathlib.Path]:
        """The files that are written: the record, then the figure."""
        return [self.out / "demo.json", self.out / "demo.png"][: 1 + self.plot]
