"""The settings of an evaluation, from flags or a YAML file."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse.typing import PositiveInt

from experiments.answering import (
    BASELINES,
    METHODS,
    PAPERS,
    QUESTIONS,
    SHARES,
    MeshSettings,
    Setting,
    budget_tokens,
    knobs_by_method,
    paper_method,
    read_knobs,
)
from experiments.benchmarks import READERS, TRUNCATIONS
from experiments.cli import names, option, parse_yaml, write_yaml
from experiments.tasks import GROUPS, TASKS, expand, get_task
from kvjax import registry
from kvjax.cache.quantised import KV_DTYPES
from kvjax.protocol.fields import check_field, check_names

_GROUPS = {"papers": PAPERS, "baselines": BASELINES, "all": METHODS}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A method as the user asked for it.

    Attributes:
        name: the method's registered name.
        knobs: the given knobs. A budget may be a share of the length such as "1/8"; the method inside a wrapper is a name or
            ``{name: knobs}``; a pattern of prompts is ``{kind: ..., ...}``.
    """

    name: str
    knobs: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The name in tables."""
        knobs = ", ".join(f"{knob}={self._text(knob, value)}" for knob, value in self.knobs.items())
        return f"{self.name}({knobs})" if knobs else self.name

    @property
    def inner(self) -> dict[str, dict[int | None, Choice]]:
        """The methods inside of a wrapper that are not methods yet, by field and layer; the layer is None without layers."""
        fields = {}
        for field, by_layer in registry.inner_fields(registry.find(self.name)).items():
            value = self.knobs.get(field)
            if by_layer and not isinstance(value, (Mapping, type(None))):
                raise ValueError(f"{field} must be methods by layer, as {{0: full}}, got {value!r}")
            values = value or {} if by_layer else {None: value}
            choices = {at: _choice(one) for at, one in values.items() if isinstance(one, (str, Mapping))}
            fields |= {field: choices} if choices else {}
        return fields

    def at(self, length: int, tokenizer: Any, config: Any, extra: Mapping[str, Any]) -> Setting:
        """Make the method for a length in tokens.

        Knobs not given are the paper's, or an eighth of the length as a baseline's budget. ``extra`` replaces the paper's
        knobs, but not the given knobs; ``config`` is None if there is no tokenizer.
        """
        return paper_method(self.name, length, tokenizer=tokenizer, config=config, given={**extra, **self.knobs})

    def _text(self, knob: str, value: Any) -> Any:
        """Format the value of a knob for a label."""
        if choices := self.inner.get(knob):
            return ", ".join(choice.label if at is None else f"{at}: {choice.label}" for at, choice in choices.items())
        return f"({', '.join(f'{name}={x}' for name, x in value.items())})" if isinstance(value, Mapping) else value


def _choice(value: str | Mapping[str, Any]) -> Choice:
    """Parse a method and its knobs from a text or ``{name: knobs}``."""
    name, knobs = registry.one_inner(value)
    if name in _GROUPS:
        raise ValueError(f"a wrapper has one method, as a name or {{name: knobs}}, got the group {name!r}")
    name, in_name = registry.parse_method(name, read_knobs)
    return Choice(name, {**in_name, **knobs})


def choices_of(entries: Any) -> tuple[Choice, ...]:
    """Parse methods from names, paths of classes, texts with brackets, names of groups, and {name: knobs}.

    Raises:
        ValueError: an entry has none of these forms.
    """
    choices: list[Choice] = []
    if isinstance(entries, str):
        entries = names(entries)
    for entry in entries if isinstance(entries, (list, tuple)) else [entries]:
        if isinstance(entry, Choice):
            choices.append(entry)
        elif isinstance(entry, Mapping):
            for name, knobs in entry.items():
                if not isinstance(knobs or {}, Mapping):
                    raise ValueError(f"methods: expected knobs of {name!r} as {{knob: value}}, got {knobs!r}")
                choices.append(_choice({str(name): knobs}))
        elif isinstance(entry, str):
            group = _GROUPS.get(registry.canonical_name(entry))
            choices += [_choice(entry)] if group is None else [Choice(member, {}) for member in group]
        else:
            raise ValueError(f"methods: expected names, or {{name: knobs}}, got {entry!r}")
    return tuple(choices)


def set_knobs(choices: Sequence[Choice], pairs: Sequence[str]) -> tuple[Choice, ...]:
    """Set knobs of some methods by texts ``method.knob=value``; a method that is not among ``choices`` is refused."""
    results = tuple(choices)
    for name, knobs in knobs_by_method(pairs, read_knobs).items():
        if not any(choice.name == name for choice in results):
            raise ValueError(f"--set names {name!r}, which is none of the methods {', '.join(c.name for c in results)}")
        results = tuple(Choice(c.name, {**c.knobs, **knobs}) if c.name == name else c for c in results)
    return results


def written(choices: Sequence[Choice]) -> list[str | dict[str, Any]]:
    """Convert methods to entries of a YAML file, which `choices_of` reads again, in any process."""
    return [_entry(choice) for choice in choices]


def _entry(choice: Choice) -> str | dict[str, Any]:
    knobs, name = dict(choice.knobs), registry.lasting_name(choice.name)
    for field, choices in choice.inner.items():
        entries = {at: _entry(inner) for at, inner in choices.items()}
        knobs[field] = entries[None] if None in entries else {**knobs[field], **entries}
    return {name: knobs} if knobs else name


def check_knobs(name: str, knobs: Mapping[str, Any]) -> None:
    """Refuse knobs that a method does not have, and values that a knob does not take.

    Shares of a length are left to `budget_tokens`, files to `read_files`, and methods inside wrappers to `check_choices`.
    """
    cls = registry.find(name)
    check_names(cls, knobs)
    inner = registry.inner_fields(cls)
    for knob, value in knobs.items():
        known = isinstance(value, SHARES.get(knob, ())) or (knob in ("scores", "pattern") and isinstance(value, str))
        if knob == "pattern" and isinstance(value, Mapping):
            registry.pattern_of(value)
        elif not known and knob not in inner:
            check_field(cls, knob, tuple(value) if isinstance(value, list) else value)


def check_choices(choices: Sequence[Choice], budgets: Sequence[str], length: int) -> None:
    """Refuse unknown methods and knobs, and budgets that are neither shares nor tokens, for the shortest length in tokens."""
    for choice in choices:
        check_knobs(choice.name, choice.knobs)
        registry.check_inner(registry.find(choice.name), choice.knobs)
        if "budget" in choice.knobs:
            budget_tokens(choice.knobs["budget"], length)
        for inner in choice.inner.values():
            check_choices(list(inner.values()), (), length)
    for share in budgets:
        budget_tokens(share, length)


def at_budgets(choices: Sequence[Choice], budgets: Sequence[str]) -> list[Choice]:
    """List Full, then every method without repeats; a method whose budget is not given comes at each of ``budgets``.

    The budget of a wrapper around one method is that method's.
    """
    results = [Choice("full", {})]
    for choice in choices:
        at_each = [_with_budget(choice, share) for share in budgets]
        results += [with_budget or choice for with_budget in at_each or [None] if with_budget or choice.name != "full"]
    return list({choice.label: choice for choice in results}.values())


def _with_budget(choice: Choice, budget: str) -> Choice | None:
    """Set the budget of a method, or of the only method inside of it; None if the budget is given, or there is none."""
    fields = registry.find(choice.name).__dataclass_fields__
    if inner := registry.inner_fields(registry.find(choice.name)):
        choices = choice.inner if len(inner) == 1 else {}
        changed = {at: _with_budget(one, budget) for ones in choices.values() for at, one in ones.items()}
        if "budget" in choice.knobs or None not in changed or changed[None] is None:
            return None
        return Choice(choice.name, {**choice.knobs, next(iter(inner)): {changed[None].name: dict(changed[None].knobs)}})
    if "budget" not in fields or "budget" in choice.knobs:
        return None
    return Choice(choice.name, {"budget": budget, **choice.knobs})


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationSettings(MeshSettings):
    """The settings of an evaluation; their names are the keys of a YAML file and the flags of the command line.

    Attributes:
        tasks: comma-separated: names of tasks and groups (see kvjax ls tasks), or FORMAT:PATH of a file (questions, for
            your own; ruler, kvpress, longbench, longbench2, infinitebench, scbench, helmet), or lm-eval:TASK of the harness
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
            (default all); a YAML file may have {name: knobs}, too; Full always runs first
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
    workers: int = 2
    methods: tuple[Choice, ...] = option(tuple(Choice(name, {}) for name in METHODS), read=choices_of, write=written)
    budgets: tuple[str, ...] = ()
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
        check_choices(self.methods, self.budgets, min(self.lengths, default=1024))

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


_JOINED = ("tasks", "methods", "lengths", "budgets")  # settings to which another run of a folder adds


def joined(before: str, now: str) -> str:
    """Merge a new run's settings into the text of a folder's config.yaml, which people may have shortened.

    Tasks, methods, lengths and budgets of the earlier runs come first; all other settings are the new run's. A method with
    other knobs is another entry, because it has rows of its own.
    """
    old, new = (parse_yaml(text) or {} for text in (before, now))
    if not isinstance(old, Mapping) or not all(isinstance(old.get(name) or [], list) for name in _JOINED):
        raise ValueError(f"expected settings by name with lists of {', '.join(_JOINED)}, got {before[:60]!r}")
    choices_of(old.get("methods") or ())  # refuses what is no method
    for name in _JOINED:
        new[name] = [*(value for value in old.get(name) or () if value not in new[name]), *new[name]]
    return write_yaml(new)
