"""The settings of an evaluation, from flags or a YAML file."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from jsonargparse.typing import NonNegativeInt, PositiveInt

from experiments.answering import METHODS, QUESTIONS, Choice, MeshSettings, at_budgets, budgets_of, choices_of, written
from experiments.benchmarks import READERS, TRUNCATIONS
from experiments.cli import option
from experiments.tasks import GROUPS, TASKS, expand, get_task
from kvjax.cache.quantised import KV_DTYPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings(MeshSettings):
    """The settings of an evaluation; their names are the keys of a YAML file and the flags of the command line.

    Attributes:
        tasks: comma-separated: names of tasks and groups (see kvjax ls tasks), or FORMAT:PATH of a file (questions, for
            your own; ruler, kvpress, longbench, longbench2, infinitebench, scbench, helmet, nolima, babilong, oolong,
            mrcr), or lm-eval:TASK of the harness
        lengths: comma-separated, tokens of prompt and answer of generated tasks
        samples: contexts of a cell; a file may have fewer
        questions: questions about each context
        depths: comma-separated, depths of needles, 0 to 1; a cell for each depth (default: drawn for each sample)
        question: where the question stands. prefill: in the prompt that is compressed, as in the papers; extend: asked of a
            copy of the compressed cache; turns: asked of the cache that has the earlier questions and answers; auto: prefill
            for methods that choose by the prompt's end, extend for other methods
        template: auto uses the checkpoint's chat template, if it has one; none does not
        system: text of the template's system turn (default: the template's own)
        template_variables: a variable of the template, such as enable_thinking=false (Qwen3, which otherwise
            spends the answer's tokens on thinking); repeatable
        haystack: 'noise', 'prose', 'code' (Python's standard library) or file:PATH for tasks that take a haystack, also
            TASK=KIND, comma-separated; also the files of qa_1 and qa_2 (default: each task's own)
        max_length: the most tokens of prompt and answer (default: the model's own limit); above that limit, methods use
            positions that the model was not trained for
        truncation: what is done with longer prompts: drop the middle, keep the head or the tail, or refuse them (error)
        max_new_tokens: most tokens of an answer (default: each task's own limit)
        seed: seed of generated examples
        batch_tokens: rows x length of a batch, at most. eval takes fewer rows, but at least 65536 tokens, where a cache
            does not fit otherwise. On a mesh, rows are a multiple of its axis data, filled up with copies that are not scored
        kv_dtype: store the keys and values of all methods, including Full, as codes: int8, float8_e4m3fn, k8v4 or int4
            (default: in the dtype of computation)
        workers: processes that make prompts
        methods: comma-separated names, package.module:Class, wrappers such as twilight(quest), or papers, baselines, all
            (default all); a YAML file may have {name: knobs}, too; Full always runs
        budgets: comma-separated shares of the length or tokens, for methods whose budget is not set
        together: the most methods that prefill a prompt together, if their caches fit; methods that evict or select during
            prefill always run alone, and with 1 all methods do

    Raises:
        ValueError: unknown names, numbers out of range.
    """

    tasks: tuple[str, ...] = ("niah_single_2", "niah_multikey_1", "vt")
    lengths: tuple[PositiveInt, ...] = (4096,)
    samples: PositiveInt = 20
    questions: PositiveInt = 1
    depths: tuple[float, ...] = ()
    question: str = option("prefill", choices=QUESTIONS)
    template: str = option("auto", choices=("auto", "none"))
    system: str | None = None
    template_variables: Mapping[str, Any] = option(factory=dict, flag="template-set")
    haystack: tuple[str, ...] = ()
    max_length: PositiveInt | None = None
    truncation: str = option("middle", choices=TRUNCATIONS)
    max_new_tokens: PositiveInt | None = None
    seed: int = 0
    batch_tokens: PositiveInt = 65536
    kv_dtype: str | None = option(None, choices=tuple(KV_DTYPES))
    workers: NonNegativeInt = 2
    methods: tuple[Choice, ...] = option(tuple(Choice(name, {}) for name in METHODS), read=choices_of, write=written)
    budgets: tuple[str, ...] = option((), read=budgets_of)
    together: PositiveInt = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"depths must lie in [0, 1], got {depth}")
        if self.question == "turns" and self.questions == 1 and not self.files:
            raise ValueError("question='turns' asks one question after the other: questions must be above 1, got 1")
        for name in self.generated:
            kind, colon, _ = name.partition(":")
            if colon:
                raise ValueError(f"unknown format {kind!r} in {name!r}, expected one of {', '.join(READERS)}")
            if pathlib.Path(name).suffix and name not in (*TASKS, *GROUPS):
                raise ValueError(
                    f"unknown task {name!r}; a file is written FORMAT:PATH, with a format of {', '.join(READERS)}, such as "
                    f"questions:{name} for a table of your own questions"
                )
        apart = [name for name in expand(self.generated) if get_task(name).in_turns]
        if apart and self.questions > 1 and self.question != "turns":
            raise ValueError(
                f"{apart[0]} asks questions that refer to earlier ones: expected question='turns' for more than one question "
                f"about a context, got {self.question!r}"
            )
        for entry in self.haystack:
            task, equals, _ = entry.partition("=")
            if equals:
                get_task(task)
        for name in self.generated:
            if name in TASKS and get_task(name).needs_file and self.haystack_of(name) is None:
                raise ValueError(f"{name} asks the questions of a file: give it as haystack {name}=file:PATH")

    @property
    def files(self) -> tuple[str, ...]:
        """FORMAT:PATH entries of `tasks`."""
        return tuple(task for task in self.tasks if task.partition(":")[0] in READERS and ":" in task)

    @property
    def generated(self) -> tuple[str, ...]:
        """Names and groups of generated tasks."""
        return tuple(task for task in self.tasks if task not in self.files)

    def haystack_of(self, task: str) -> str | None:
        """Return the kind of haystack that is given for a task, by its name or for all tasks; None if none is given."""
        named = dict(entry.split("=", 1) for entry in self.haystack if "=" in entry)
        if task in named:
            return named[task]
        if get_task(task).needs_file or not get_task(task).haystack:
            return None
        return next((entry for entry in self.haystack if "=" not in entry), None)

    @property
    def choices(self) -> list[Choice]:
        """Full, then every method without repeats; a method whose budget is not given comes at each of `budgets`."""
        return at_budgets(self.methods, self.budgets)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shown:
    """What is shown of results.

    Attributes:
        plot: draw figures (needs matplotlib)
        json: print a JSON line instead of the table
        quiet: show no progress
    """

    plot: bool = True
    json: bool = False
    quiet: bool = False
