"""Methods as users ask for them: parsed from texts and YAML, written again, and made at a length."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.answering.presets import BASELINES, METHODS, PAPERS, budget_tokens, preset, read_knobs, takes_share
from experiments.cli import names
from kvjax import head_scores, registry
from kvjax.methods.budgets import SHARE
from kvjax.protocol.method import Method
from kvjax.wrappers import patterns
from kvjax.wrappers.reuse import read_head_map

_GROUPS = {"papers": PAPERS, "baselines": BASELINES, "all": METHODS}
_SHARES: Mapping[str, tuple[type, ...]] = {"budget": (str, float), "capacity": (str,)}  # types of a share of the length
# Knobs that may be the path of a file, and what reads it.
_FILES = {
    "scores": head_scores,
    "pattern": patterns,
    "head_map": read_head_map,
    "head_factor": lambda path, _: _factors(path),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """A method with the knobs of a run.

    Attributes:
        name: the method's name.
        method: the method.
        note: the difference from the paper's own setting, "" if there is none.
    """

    name: str
    method: Method
    note: str


@dataclasses.dataclass(frozen=True)
class Choice:
    """A method as the user asked for it.

    Attributes:
        name: the method's registered name.
        knobs: the given knobs. A budget may be a share of the length such as "1/8"; a method inside is a `Choice`, or one for
            each layer index; a pattern of prompts is ``{kind: ..., ...}``.
    """

    name: str
    knobs: Mapping[str, Any]

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> Choice:
        """Parse a method and its knobs from a text (see `kvjax.registry.parse_method`) or ``{name: knobs}``.

        Raises:
            ValueError: an unknown method, or a value of another form.
        """
        name, knobs = registry.one_inner(value)
        if name in _GROUPS:
            raise ValueError(f"a wrapper has one method, as a name or {{name: knobs}}, got the group {name!r}")
        name, in_name = registry.parse_method(name, read_knobs)
        knobs = {**in_name, **knobs}
        for field, by_layer in registry.inner_fields(registry.find(name)).items():
            inner = knobs.get(field)
            if by_layer and not isinstance(inner, (Mapping, type(None))):
                raise ValueError(f"{field} must be methods by layer, as {{0: full}}, got {inner!r}")
            if by_layer and inner:
                knobs[field] = {at: _inside(one) for at, one in inner.items()}
            elif inner is not None:
                knobs[field] = _inside(inner)
        return cls(name, knobs)

    def check(self) -> Choice:
        """Refuse knobs that the method does not have, and values that it does not take for a long text; return the choice."""
        self.at(1 << 17, None, None)
        return self

    @property
    def label(self) -> str:
        """The name in tables."""
        knobs = ", ".join(f"{knob}={_text(value)}" for knob, value in self.knobs.items())
        return f"{self.name}({knobs})" if knobs else self.name

    @property
    def entry(self) -> str | dict[str, Any]:
        """The entry of a YAML file, which `choices_of` reads again, in any process."""
        knobs, name = {knob: _written(value) for knob, value in self.knobs.items()}, registry.lasting_name(self.name)
        return {name: knobs} if knobs else name

    def with_budget(self, budget: str) -> Choice | None:
        """Set the budget of the method, or of the only method inside of it; None if the budget is given, or there is none."""
        cls = registry.find(self.name)
        if "budget" in self.knobs:
            return None
        if fields := registry.inner_fields(cls):
            field, *others = fields
            inner = self.knobs.get(field)
            changed = inner.with_budget(budget) if isinstance(inner, Choice) and not others else None
            return changed and Choice(self.name, {**self.knobs, field: changed})
        return Choice(self.name, {"budget": budget, **self.knobs}) if "budget" in cls.__dataclass_fields__ else None

    def at(
        self, length: int, tokenizer: Any, config: Any, extra: Mapping[str, Any] | None = None, *, own: bool = False
    ) -> Setting:
        """Make the method for a length in tokens.

        Knobs that are not given are the paper's (see `experiments.answering.presets.preset`), or with ``own`` the class's own
        defaults. `kvjax.wrappers.Stages` evicts to twice a baseline's budget, and then retrieves from twice as many tokens as
        it attends to. ``extra`` replaces the paper's knobs, but not the given knobs; ``config`` is None if no model is known.
        """
        given = {**(extra or {}), **self.knobs}
        knobs, note = ({}, "") if own else preset(self.name, length, config)
        if knobs.keys() & given.keys():  # the note describes knobs that are replaced
            note = ""

        def value_of(knob: str, value: Any) -> Any:
            if isinstance(value, Choice):
                doubled = not own and knob == "evict" and "retrieve" in given and takes_share(value.name)
                return value.at(length, tokenizer, config, {"budget": 2 * length // SHARE} if doubled else {}, own=own).method
            if isinstance(value, Mapping) and knob != "pattern":
                return {layer: value_of(knob, one) for layer, one in value.items()}
            if isinstance(value, _SHARES.get(knob, ())):
                return budget_tokens(value, length)
            if isinstance(value, str) and knob in _FILES:
                return _FILES[knob](value, config)
            return tuple(value) if isinstance(value, list) else value  # a YAML file has lists where knobs are tuples

        # Without a model, the files of knobs are not read.
        found = {knob: x for knob, x in given.items() if config is not None or knob not in _FILES or not isinstance(x, str)}
        knobs = knobs | {knob: value_of(knob, value) for knob, value in found.items()}
        try:
            method = registry.make(self.name, tokenizer, None if config is None else config.vocab_size, **knobs)
        except ValueError as error:
            if given or not note:
                raise
            raise ValueError(f"{error} ({note}, at {length} tokens): set the budget, or use a longer length") from error
        return Setting(self.name, method, note)


def _factors(path: str) -> tuple[float, ...]:
    """Read the knob ``head_factor`` from a file of `experiments.heads.kept`."""
    try:
        return tuple(json.loads(pathlib.Path(path).read_text(encoding="utf-8"))["head_factor"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f'{path} must hold {{"head_factor": [number, ...]}}, got: {error!r:.80}') from error


def _inside(value: Any) -> Any:
    return Choice.parse(value) if isinstance(value, (str, Mapping)) else value


def _text(value: Any) -> Any:
    """Format the value of a knob for a label."""
    if isinstance(value, Choice):
        return value.label
    if isinstance(value, Mapping):
        if any(isinstance(inner, Choice) for inner in value.values()):
            return ", ".join(f"{at}: {_text(inner)}" for at, inner in value.items())
        return f"({', '.join(f'{name}={x}' for name, x in value.items())})"
    return value


def _written(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {at: _written(inner) for at, inner in value.items()}
    return value.entry if isinstance(value, Choice) else value


def _each(entries: Any) -> Sequence[Any]:
    """List the entries of a text with commas, of a list, or the only entry of a YAML file."""
    return names(entries) if isinstance(entries, str) else entries if isinstance(entries, (list, tuple)) else [entries]


def choices_of(entries: Any) -> tuple[Choice, ...]:
    """Parse methods from names, paths of classes, texts with brackets, names of groups, and {name: knobs}.

    Raises:
        ValueError: an entry has none of these forms, or an error of `Choice.parse` or `Choice.check`.
    """
    choices: list[Choice] = []
    for entry in _each(entries):
        if isinstance(entry, Choice):
            choices.append(entry)
        elif isinstance(entry, Mapping):
            choices += [Choice.parse({str(name): knobs}).check() for name, knobs in entry.items()]
        elif isinstance(entry, str):
            group = _GROUPS.get(registry.canonical_name(entry))
            choices += [Choice.parse(entry).check()] if group is None else [Choice(member, {}) for member in group]
        else:
            raise ValueError(f"methods: expected names, or {{name: knobs}}, got {entry!r}")
    return tuple(choices)


def set_knobs(choices: Sequence[Choice], pairs: Sequence[str]) -> tuple[Choice, ...]:
    """Set knobs of some methods by texts ``method.knob=value``; a method that is not among ``choices`` is refused."""
    results = tuple(choices)
    for name, knobs in knobs_by_method(pairs, read_knobs).items():
        if not any(choice.name == name for choice in results):
            raise ValueError(f"--set names {name!r}, which is none of the methods {', '.join(c.name for c in results)}")
        results = tuple(Choice.parse({name: {**c.knobs, **knobs}}).check() if c.name == name else c for c in results)
    return results


def written(choices: Sequence[Choice]) -> list[str | dict[str, Any]]:
    """Convert methods to entries of a YAML file."""
    return [choice.entry for choice in choices]


def budgets_of(entries: Any) -> tuple[str, ...]:
    """Parse budgets, which are shares of a length or tokens; see `budget_tokens`."""
    budgets = tuple(map(str, _each(entries)))
    for budget in budgets:
        budget_tokens(budget, 1)
    return budgets


def at_budgets(choices: Sequence[Choice], budgets: Sequence[str]) -> list[Choice]:
    """List Full, then every method without repeats; a method whose budget is not given comes at each of ``budgets``.

    The budget of a wrapper around one method is that method's.
    """
    results = [Choice("full", {})]
    for choice in choices:
        at_each = [choice.with_budget(budget) for budget in budgets]
        results += [with_budget or choice for with_budget in at_each or [None] if with_budget or choice.name != "full"]
    return list({choice.label: choice for choice in results}.values())


def paper_method(name: str, length: int, *, tokenizer: Any, config: Any, given: Mapping[str, Any] | None = None) -> Setting:
    """Make a method at its paper's budget; see `Choice.at`.

    Args:
        name: a name, a path, or a text with brackets; see `kvjax.registry.parse_method`.
        length: tokens of context, question and answer.
        tokenizer: the model's, for methods that need one.
        config: the model, with the length that it was made for; None if it is not known.
        given: knobs that replace the paper's, as `Choice.parse` takes them.
    """
    setting = Choice.parse({name: given or {}}).at(length, tokenizer, config)
    return dataclasses.replace(setting, name=registry.canonical_name(name))


def method_with_files(text: str, config: Any) -> Method:
    """Make a method as `kvjax.make` does, of a text with knobs whose files are read: shares of a length stay shares."""
    name, knobs = registry.parse_method(text)
    inner = registry.inner_fields(registry.find(name))

    def value_of(knob: str, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return method_with_files(value, config) if knob in inner else _FILES.get(knob, lambda text, _: text)(value, config)

    return registry.make(name, **{knob: value_of(knob, value) for knob, value in knobs.items()})


def knobs_by_method(
    pairs: Sequence[str], parse: Callable[[str, Sequence[str]], dict[str, Any]] = registry.parse_knobs
) -> dict[str, dict[str, Any]]:
    """Parse knobs by method from texts ``method.knob=value``; ``parse`` reads the texts ``knob=value`` of a method."""
    grouped: dict[str, list[str]] = {}
    for pair in pairs:
        named, equals, value = pair.partition("=")
        name, dot, knob = named.rpartition(".")  # a path has dots of its own
        if not dot or not equals:
            raise ValueError(f"--set takes METHOD.KNOB=VALUE, got {pair!r}")
        grouped.setdefault(registry.canonical_name(name), []).append(f"{knob}={value}")
    for name in grouped:
        registry.find(name)  # refuses unknown names
    return {name: parse(name, texts) for name, texts in grouped.items()}
