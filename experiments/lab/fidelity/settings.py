"""The settings of `experiments.lab.fidelity`, from flags or a YAML file."""

import dataclasses
from collections.abc import Mapping

from jsonargparse.typing import PositiveInt

from experiments.answering import METHODS, Choice, ModelSettings, at_budgets, budgets_of, choices_of, written
from experiments.cli import option
from experiments.tasks import get_task
from kvjax.cache.quantised import KV_DTYPES

# prose, code: continued held-out text; answers: the right answer to a question; greedy: Full's own answer to the question.
STREAMS = ("prose", "code", "answers", "greedy")
WHOLE_PROSE = "prose:whole"  # a haystack: prose without a part that is held out


@dataclasses.dataclass(frozen=True, kw_only=True)
class FidelitySettings(ModelSettings):
    """The settings of a measurement of distances from Full; their names are also the keys of a YAML file.

    Attributes:
        methods: comma-separated names, package.module:Class, wrappers such as twilight(quest), or papers, baselines, all
            (default all); a YAML file may have {name: knobs}, too
        budgets: comma-separated shares of the length or tokens, for methods whose budget is not set
        lengths: comma-separated, tokens of context and text together
        streams: comma-separated: prose, a continued held-out text; code, continued files of Python's standard library;
            answers, the right answer of a long task; greedy, Full's own answer of the task
        samples: texts of a stream
        tokens: decode steps along each text
        haystack: prose or file:PATH, the text of prose and the haystack of the task; prose:whole, the same with the part that
            the shipped models were trained on, for other models beyond 16K; code, the haystack of the task
        task: the task of answers and greedy
        template: auto uses the checkpoint's chat template for questions, if it has one; none does not
        system: text of the template's system turn (default: the template's own)
        template_variables: a variable of the template, such as enable_thinking=false; repeatable
        seed: seed of the texts
        batch_tokens: rows x length that run together
        kv_dtype: store keys and values as codes: int8, float8_e4m3fn, k8v4 or int4; rows are still compared with Full in the
            dtype of computation, and the row of Full shows the effect of rounding (default: in the dtype of computation)
        reference: the model whose Full is the reference, with weights as numbers: a name, a directory or a GGUF file with the
            same vocabulary; beside weight_dtype the row of Full shows the effect of rounded weights (default: the measured
            model)

    Raises:
        ValueError: unknown names, numbers out of range.
    """

    methods: tuple[Choice, ...] = option(tuple(Choice(name, {}) for name in METHODS), read=choices_of, write=written)
    budgets: tuple[str, ...] = option((), read=budgets_of)
    lengths: tuple[PositiveInt, ...] = (2048,)
    streams: tuple[str, ...] = option(("prose", "answers"), choices=STREAMS)
    samples: PositiveInt = 16
    tokens: PositiveInt = 128
    haystack: str = "prose"
    task: str = "listing"
    template: str = option("auto", choices=("auto", "none"))
    system: str | None = None
    template_variables: Mapping[str, object] = option(factory=dict, flag="template-set")
    seed: int = 0
    batch_tokens: PositiveInt = 65536
    kv_dtype: str | None = option(None, choices=tuple(KV_DTYPES))
    reference: str | None = None

    def __post_init__(self) -> None:
        for name in ("lengths", "streams", "methods"):
            if not vars(self)[name]:
                raise ValueError(f"{name} must name at least one, got none")
        if min(self.lengths) <= self.tokens:
            raise ValueError(
                f"lengths count context and text: they must be above tokens={self.tokens}, got {min(self.lengths)}"
            )
        if self.haystack not in ("prose", WHOLE_PROSE, "code") and not self.haystack.startswith("file:"):
            raise ValueError(f"haystack must be 'prose', {WHOLE_PROSE!r}, 'code' or file:PATH, got {self.haystack!r}")
        if self.haystack == "code" and "prose" in self.streams:
            raise ValueError("haystack 'code' is no text for the stream prose: name the stream code instead of it")
        if get_task(self.task).needs_file:
            raise ValueError(f"task must be a generated task without a file of questions, got {self.task!r}")

    @property
    def task_haystack(self) -> str | None:
        """The haystack of the task; None where the task has its own."""
        if get_task(self.task).haystack != "prose":
            return None
        return "prose" if self.haystack == WHOLE_PROSE else self.haystack

    @property
    def choices(self) -> list[Choice]:
        """Full, then every method at each of its budgets."""
        return at_budgets(self.methods, self.budgets)
