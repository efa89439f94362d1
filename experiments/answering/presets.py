"""Methods at the budgets of their papers, and baselines at an eighth of the context."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvjax import head_scores, registry
from kvjax.methods.budgets import SHARE
from kvjax.protocol.method import Method
from kvjax.wrappers import patterns

PAPERS = ("chess", "sentencekv", "tokenselect", "mosaickv", "pariskv")
_ORDER = ("quest", "snapkv", "streamingllm", "h2o", "keydiff")  # order of the tables; other baselines follow
_DIVIDED = ("ntk", "pi")  # methods whose positions or frequencies are divided by a factor
POSITIONS = (*_DIVIDED, "selfextend")  # Full for texts beyond the length that the model was trained for
_ALL_READ = ("full", *POSITIONS, "prefill")  # methods whose steps read all tokens on purpose
MEASURED = ("duoattention", "headkv")  # methods that need a file of scores of a model's heads: `--set headkv.scores=PATH`
_OTHERS = tuple(name for name in registry.builtin() if name not in ("full", *PAPERS, *_ORDER, *POSITIONS, *MEASURED))
BASELINES = (*_ORDER, *_OTHERS)
SHARES: Mapping[str, tuple[type, ...]] = {"budget": (str, float), "capacity": (str,)}  # types of a share of the length
METHODS = ("full", *PAPERS, *BASELINES)
# Where a question stands: in the compressed prompt, after it, after earlier questions and answers, or as the method needs.
QUESTIONS = ("prefill", "extend", "turns", "auto")


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


def paper_method(name: str, length: int, *, tokenizer: Any, config: Any, given: Mapping[str, Any] | None = None) -> Setting:
    """Make a method at its paper's budget, which is scaled down if it would fill more than half of the context.

    A method outside of kvjax that has a budget gets the budget of the baselines, and so do methods inside of a wrapper.
    `kvjax.wrappers.Stages` evicts to twice this budget, and then retrieves from twice as many tokens as it attends to.

    Args:
        name: a name, a path, or a text with brackets; see `kvjax.registry.parse_method`.
        length: tokens of context, question and answer.
        tokenizer: the model's, for methods that need one.
        config: the model, with the length that it was made for; None if it is not known.
        given: knobs that replace the paper's. Budgets may be shares of the length, and methods inside of a wrapper may be
            names or ``{name: knobs}``.
    """
    shown = registry.canonical_name(name)
    name, in_name = registry.parse_method(shown, read_knobs)
    cls, asked = registry.find(name), {**in_name, **(given or {})}
    registry.check_inner(cls, asked)
    inner = registry.inner_fields(cls)

    def inner_method(field: str, value: Any) -> Any:
        """Make the method inside of a wrapper."""
        if not isinstance(value, (str, Mapping)):
            return value
        inner_name, knobs = registry.one_inner(value)
        inner_name, more = registry.parse_method(inner_name, read_knobs)
        knobs = {**more, **knobs}
        if field == "evict" and "retrieve" in inner and _takes_budget(inner_name) and "budget" not in knobs:
            knobs["budget"] = 2 * length // SHARE
        return paper_method(inner_name, length, tokenizer=tokenizer, config=config, given=knobs).method

    scaled = cls.at_length(length)
    knobs, note = scaled or ({}, "")
    if name in _DIVIDED and config is not None:
        knobs, note = _factor(length, config.max_position_embeddings)
    if scaled is None and "budget" in cls.__dataclass_fields__ and not inner:
        knobs, note = {"budget": length // SHARE}, f"1/{SHARE} of the context"
    if knobs.keys() & asked.keys():  # the note describes knobs that are replaced
        note = ""
    for knob, value in asked.items():
        if isinstance(value, list):  # a YAML file has lists where knobs are tuples
            asked[knob] = tuple(value)
        elif isinstance(value, SHARES.get(knob, ())):
            asked[knob] = budget_tokens(value, length)
        elif knob in inner and inner[knob] and isinstance(value, Mapping):
            asked[knob] = {layer: inner_method(knob, one) for layer, one in value.items()}
        elif knob in inner:
            asked[knob] = inner_method(knob, value)
    try:
        size = None if config is None else config.vocab_size
        method = registry.make(name, tokenizer, size, **{**knobs, **read_files(asked, config)})
    except ValueError as error:
        if given or not note:
            raise
        raise ValueError(f"{error} ({note}, at {length} tokens): set the budget, or use a longer length") from error
    return Setting(shown, method, note)


def preset_knobs(name: str) -> set[str]:
    """List the knobs that `paper_method` sets where they are not given."""
    cls = registry.find(name)
    if (scaled := cls.at_length(1 << 17)) is not None:
        return {*scaled[0]}
    if name in _DIVIDED:
        return {"factor"}
    return {"budget"} & {*cls.__dataclass_fields__} if not registry.inner_fields(cls) else set()


def _takes_budget(name: str) -> bool:
    cls = registry.find(name)
    return "budget" in cls.__dataclass_fields__ and cls.at_length(1 << 17) is None


def read_files(given: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Replace the names of files in knobs by their contents, scores of heads or patterns of prompts, for a model."""
    read = {"scores": head_scores, "pattern": patterns}
    return {knob: read[knob](x, config) if knob in read and isinstance(x, str) else x for knob, x in given.items()}


def read_knobs(method: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Parse texts ``knob=value`` into values of the knobs' types; a budget may be a share such as 1/8.

    Raises:
        ValueError: see `kvjax.registry.parse_knobs`.
    """
    knobs: dict[str, Any] = {}
    registry.check_once([pair.partition("=")[0].strip() for pair in pairs], ", ".join(pairs))
    for pair in pairs:
        knob, _, value = pair.partition("=")
        share = knob.strip() == "budget" and ("/" in value or "." in value)
        knobs |= {"budget": value.strip()} if share else registry.parse_knobs(method, [pair])
    return knobs


def without_effect(row: Mapping[str, Any]) -> bool:
    """Tell whether a record's row tested nothing: its method should read fewer tokens than Full, and read all of them."""
    return row["no_effect"] and row["method"].partition("(")[0] not in _ALL_READ


def resolve_question(method: Method, question: str) -> str:
    """Resolve where the question stands under a method: "prefill", "extend" or "turns".

    "auto" is "prefill" for methods that choose tokens or channels by the prompt's last queries, so that they see the
    question, and "extend" for all other methods.
    """
    if question == "auto":
        return "prefill" if method.composable and method.obs_window > 0 else "extend"
    return question


def budget_tokens(share: str | int | float, length: int) -> int:
    """Compute the tokens of a budget, given as a share of a length (``1/8``, ``0.125``) or as a number of tokens.

    Raises:
        ValueError: the budget is neither.
    """
    top, _, bottom = str(share).strip().partition("/")
    try:
        value = float(top) / float(bottom or 1)
    except (ValueError, ZeroDivisionError):
        value = -1.0
    if not (0 < value <= 1 or (value > 1 and value.is_integer() and not bottom)):
        raise ValueError(f"a budget is a share such as 1/8 or a number of tokens such as 256, got {share!r}")
    return round(value * length) if bottom or value < 1 else int(value)


def _factor(length: int, window: int) -> tuple[dict[str, Any], str]:
    """Divide by the length over the model's window, as the papers do, and by 1 within the window, which changes nothing."""
    factor = max(1.0, length / window)
    text = "{} tokens over the model's {}" if factor > 1 else "as Full: {} tokens fit the model's {}"
    return {"factor": factor}, text.format(length, window)


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


def budget_of(row: Mapping[str, Any]) -> int:
    """Return the tokens per KV head that a row's setting asks for.

    Methods ask by ``budget`` in tokens (a mean, if layers differ), by a ``fraction`` of the tokens, or by ``ratios`` whose
    product is the fraction. The budget of a setting that asks for none, as Full, ThinK or a wrapper, is what was measured:
    the tokens attended.
    """
    knobs = row.get("knobs") or {}
    if isinstance(budget := knobs.get("budget"), (int, float)) or (budget and _numbers(budget)):
        return round(float(np.mean(budget)))
    share = knobs.get("fraction", knobs.get("ratios"))
    if isinstance(share, (int, float)) or (share and _numbers(share)):
        return round(math.prod(np.atleast_1d(share).tolist()) * row["length_tokens"])
    return round(row["attended_tokens"])


def _numbers(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, (int, float)) for value in values)
