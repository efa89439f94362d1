"""What an evaluation runs, from flags or a YAML file."""

from __future__ import annotations

import dataclasses
import difflib
import pathlib
import typing
from collections.abc import Mapping
from typing import Any

from experiments.answering.presets import BASELINES, METHODS, PAPERS, Setting, budget_tokens, paper_method
from experiments.suites.readers import READERS
from experiments.tasks import TASKS, expand, get_task
from kvjax import registry

PLACES = ("auto", "prefill", "extend", "turns")
TRUNCATIONS = ("middle", "head", "tail", "error")
_GROUPS = {"papers": PAPERS, "baselines": BASELINES, "all": METHODS}


@dataclasses.dataclass(frozen=True)
class Choice:
    """One method as it was asked for.

    Attributes:
        name: registered name.
        knobs: given ones; a budget may be a share of the length such as "1/8".
    """

    name: str
    knobs: Mapping[str, Any]

    @property
    def label(self) -> str:
        """Name in tables."""
        given = ", ".join(f"{knob}={value}" for knob, value in self.knobs.items())
        return f"{self.name}({given})" if given else self.name

    def at(self, length: int, tokenizer: Any, config: Any, extra: Mapping[str, Any]) -> Setting:
        """The method for a length of context and answer; what is not given is its paper's, baselines keep an eighth.

        Args:
            length: tokens.
            tokenizer: for methods that read text.
            config: the model.
            extra: knobs that go before the paper's, but not before the given ones.
        """
        knobs = {**extra, **self.knobs}
        for knob in ("budget", "capacity"):
            if isinstance(knobs.get(knob), str if knob == "capacity" else (str, float, int)):
                knobs[knob] = budget_tokens(knobs[knob], length)
        return paper_method(self.name, length, tokenizer=tokenizer, config=config, given=knobs)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run; the same names are the keys of a YAML file and the flags of the command line.

    Attributes:
        tasks: names and groups of `experiments.tasks`, "perplexity", or FORMAT:PATH of a file.
        methods: names, groups (papers, baselines, all), or {name: knobs}; Full always runs first.
        lengths: tokens of prompt and answer, for generated tasks.
        budgets: shares or tokens, for methods with a budget that has not been given one.
        samples: contexts of a cell; of a file, at most.
        questions: about each context.
        depths: where needles go, 0 to 1, a cell each; none draws them.
        question: where it stands: "prefill" (in the prompt that is compressed, as in the papers), "extend" (asked of the
            compressed cache), "turns" (one after the other in one cache), "auto" (`experiments.answering.presets`).
        model: Hugging Face directory, or "builtin".
        template: "auto" uses the checkpoint's chat template, if it has one; "none" does not.
        system: text of the template's system turn; None leaves it to the template.
        template_variables: what else the template reads, for example {"enable_thinking": false} (Qwen3, which otherwise
            spends the answer's tokens on thinking).
        haystack: kinds for tasks that take one ("noise", "prose", "file:PATH"), each for all or, as TASK=KIND, for one;
            also the text of "perplexity" and the files of qa_1 and qa_2. Without one a task uses its own.
        max_length: tokens of prompt and answer at most; None takes what the model was made for. More than that lets methods
            read positions that the model was not trained for.
        truncation: of longer prompts: "middle", "head", "tail" or "error".
        max_new_tokens: None takes each task's.
        perplexity_tokens: tokens that are scored after the first `lengths` ones.
        seed: of generated examples.
        dtype: of computation; None takes bfloat16 on a GPU and float32 elsewhere.
        batch_tokens: rows x length generated together.
        workers: processes that make prompts.

    Raises:
        ValueError: unknown names, numbers out of range.
    """

    tasks: tuple[str, ...] = ("niah_single_2", "niah_multikey_1", "vt")
    methods: tuple[Choice, ...] = tuple(Choice(name, {}) for name in METHODS)
    lengths: tuple[int, ...] = (4096,)
    budgets: tuple[str, ...] = ()
    samples: int = 20
    questions: int = 1
    depths: tuple[float, ...] = ()
    question: str = "prefill"
    model: str = "builtin"
    template: str = "auto"
    system: str | None = None
    template_variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    haystack: tuple[str, ...] = ()
    max_length: int | None = None
    truncation: str = "middle"
    max_new_tokens: int | None = None
    perplexity_tokens: int = 1024
    seed: int = 0
    dtype: str | None = None
    batch_tokens: int = 65536
    workers: int = 2

    def __post_init__(self) -> None:
        for name in ("samples", "questions", "perplexity_tokens", "batch_tokens", "max_length", "max_new_tokens"):
            if (value := vars(self)[name]) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for length in self.lengths:
            if length < 1:
                raise ValueError(f"lengths must be at least 1, got {length}")
        for depth in self.depths:
            if not 0 <= depth <= 1:
                raise ValueError(f"depths must lie in [0, 1], got {depth}")
        if not isinstance(self.template_variables, Mapping):
            raise ValueError(f"template_variables must be values by name, got {self.template_variables!r}")
        _one_of("question", self.question, PLACES)
        _one_of("truncation", self.truncation, TRUNCATIONS)
        _one_of("template", self.template, ("auto", "none"))
        if self.question == "turns" and self.questions == 1 and not self.files:
            raise ValueError("question='turns' asks one question after the other: questions must be above 1, got 1")
        for name in self.generated:
            kind, colon, _ = name.partition(":")
            if colon:
                raise ValueError(f"unknown format {kind!r} in {name!r}, expected one of {', '.join(READERS)}")
        expand(self.generated)
        for entry in self.haystack:
            task, equals, _ = entry.partition("=")
            if equals and task != "perplexity":
                get_task(task)
        for name in self.generated:
            if name in TASKS and get_task(name).needs_file and self.haystack_of(name) is None:
                raise ValueError(f"{name} asks the questions of a file: give it as haystack {name}=file:PATH")
        for choice in self.methods:
            registry.make(choice.name)
            if "budget" in choice.knobs:
                budget_tokens(choice.knobs["budget"], min(self.lengths, default=1024))
        for share in self.budgets:
            budget_tokens(share, min(self.lengths, default=1024))

    @property
    def files(self) -> tuple[str, ...]:
        """FORMAT:PATH entries of `tasks`."""
        return tuple(task for task in self.tasks if task.partition(":")[0] in READERS and ":" in task)

    @property
    def generated(self) -> tuple[str, ...]:
        """Names and groups of generated tasks."""
        return tuple(task for task in self.tasks if task not in self.files and task != "perplexity")

    def haystack_of(self, task: str) -> str | None:
        """The kind given for a task, by name or for all that take one; None if there is none."""
        named = dict(entry.split("=", 1) for entry in self.haystack if "=" in entry)
        if task in named:
            return named[task]
        if task != "perplexity" and (get_task(task).needs_file or not get_task(task).haystack):
            return None
        return next((entry for entry in self.haystack if "=" not in entry), None)

    @property
    def choices(self) -> list[Choice]:
        """Full, then every method, at every budget if it has one that was not given; each once."""
        made = [Choice("full", {})]
        for choice in self.methods:
            known = [knob.name for knob in registry.knobs(registry.classes()[choice.name])]
            if self.budgets and "budget" in known and "budget" not in choice.knobs:
                made += [Choice(choice.name, {"budget": share, **choice.knobs}) for share in self.budgets]
            elif choice.name != "full":
                made.append(choice)
        return list({choice.label: choice for choice in made}.values())

    def as_dict(self) -> dict[str, Any]:
        """The settings as a YAML file has them."""
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}
        plain["template_variables"] = dict(self.template_variables)
        plain["methods"] = [{c.name: dict(c.knobs)} if c.knobs else c.name for c in self.methods]
        return plain


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


def choices_of(entries: Any) -> tuple[Choice, ...]:
    """Methods from names, groups and {name: knobs}.

    Raises:
        ValueError: an entry that is none of these.
    """
    made = []
    for entry in [entries] if isinstance(entries, (str, Mapping)) else entries:
        if isinstance(entry, Mapping):
            for name, knobs in entry.items():
                if not isinstance(knobs or {}, Mapping):
                    raise ValueError(f"methods: expected knobs of {name!r} as {{knob: value}}, got {knobs!r}")
                made.append(Choice(str(name).lower(), dict(knobs or {})))
        else:
            name = str(entry).strip().lower()
            made += [Choice(one, {}) for one in _GROUPS.get(name, (name,))]
    return tuple(made)


def from_mapping(given: Mapping[str, Any], where: str) -> Settings:
    """Settings from the keys of a YAML file or of flags.

    Args:
        given: by name; what is left out keeps its default.
        where: for messages.

    Raises:
        ValueError: an unknown key, or a value that the settings refuse.
    """
    fields = {field.name: field for field in dataclasses.fields(Settings)}
    made: dict[str, Any] = {}
    for name, value in given.items():
        if name not in fields:
            near = difflib.get_close_matches(str(name), fields, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{where}: unknown setting {name!r}{hint} expected some of {', '.join(fields)}")
        if isinstance(fields[name].default, tuple):
            value = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        made[name] = choices_of(value) if name == "methods" and None not in value else _checked(name, value, where)
    return Settings(**made)


def _checked(name: str, value: Any, where: str) -> Any:
    """The value, texts made of numbers where texts are meant (a budget of 256)."""
    if name == "template_variables":
        return value  # any; the settings ask for a mapping
    hint = typing.get_type_hints(Settings)[name]
    kinds = [kind for kind in typing.get_args(hint) or (hint,) if kind is not ...]
    if str in kinds and isinstance(value, tuple):
        value = tuple(str(one) if type(one) in (int, float) else one for one in value)
    kinds += [int] if float in kinds else []
    for one in value if isinstance(value, tuple) else (value,):
        if isinstance(one, bool) or not isinstance(one, tuple(kinds)):
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{where}: {name} must be {expected}, got {one!r}")
    return value


def read_yaml(path: pathlib.Path) -> dict[str, Any]:
    """The mapping in a YAML file.

    Raises:
        ValueError: the file holds no mapping, or is no YAML.
        FileNotFoundError: there is no such file.
        ModuleNotFoundError: PyYAML is not installed.
    """
    yaml = _yaml()
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold settings by name, got {type(found).__name__}")
    return found


def to_yaml(settings: Settings) -> str:
    """The settings as a YAML file."""
    return _yaml().safe_dump(settings.as_dict(), sort_keys=False, allow_unicode=True)


def joined(before: str, now: str) -> str:
    """Settings as YAML that join those of a folder: its tasks, methods, lengths and budgets first, the rest as now."""
    old, new = (_yaml().safe_load(text) or {} for text in (before, now))  # people may have shortened the first
    renewed = {_method_name(method) for method in new["methods"]}
    old["methods"] = [method for method in old.get("methods") or () if _method_name(method) not in renewed]
    for name in ("tasks", "methods", "lengths", "budgets"):
        new[name] = [*(value for value in old.get(name) or () if value not in new[name]), *new[name]]
    return _yaml().safe_dump(new, sort_keys=False, allow_unicode=True)


def _method_name(method: str | Mapping[str, Any]) -> str:
    return method if isinstance(method, str) else next(iter(method))


def _yaml() -> Any:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "settings are written as YAML by the package 'pyyaml', which is not installed; "
            "install the extra 'eval' (pip install 'kvjax[eval]')"
        ) from error
    return yaml
