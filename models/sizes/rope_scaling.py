"""The rules that stretch RoPE to longer texts than a model was made for, as ``config.json`` declares them.

A rule holds parameters; `kvjax.rope` computes frequencies from them. The names and defaults of the fields follow transformers
5.23 (``modeling_rope_utils``).
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import numpy as np

_FREE = ("rope_theta", "rope_type", "type", "partial_rotary_factor")  # every rule may have them
_FLOAT32 = float(np.finfo(np.float32).max)  # frequencies are computed in float32
_NOTES = ("finetuned",)  # written by YaRN's authors about their weights; changes nothing


def _number(owner: str, name: str, value: Any, least: float) -> None:
    """Refuse a value that is not a finite number of at least ``least``; a bool is refused too."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (good and least <= value <= _FLOAT32):  # a comparison, unlike math.isfinite, takes whole numbers of any size
        raise ValueError(f"{owner}: {name} must be a finite number of at least {least}, got {value!r:.60}")


def _tokens(owner: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ValueError(
            f"{owner}: original_max_position_embeddings must be a positive integer below 2**31, got {value!r:.60}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeRule(abc.ABC):
    """The base of every rule. Subclasses are final."""

    rope_type: ClassVar[str]  # its name in config.json

    @abc.abstractmethod
    def context(self, declared: int) -> int:
        """Return the longest context in tokens of a model whose file declares ``declared`` positions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling(RopeRule):
    """The ``llama3`` rule for stretching RoPE: slow frequencies are divided by ``factor``, and fast frequencies stay.

    Raises:
        ValueError: the factors are not positive, or not ordered ``low < high``.
    """

    rope_type = "llama3"

    factor: float  # the context becomes longer by this factor
    low_freq_factor: float  # a frequency with fewer turns in the old context is divided by `factor`
    high_freq_factor: float  # a frequency with more turns in the old context stays
    original_max_position_embeddings: int  # tokens of the old context

    def __post_init__(self):
        _tokens("RopeScaling", self.original_max_position_embeddings)
        _number("RopeScaling", "factor", self.factor, 1)
        _number("RopeScaling", "low_freq_factor", self.low_freq_factor, 0)
        _number("RopeScaling", "high_freq_factor", self.high_freq_factor, 0)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "RopeScaling: expected 0 < low_freq_factor < high_freq_factor, "
                f"got {self.low_freq_factor!r} and {self.high_freq_factor!r}"
            )

    def context(self, declared: int) -> int:
        return declared


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeRule):
    """Position interpolation (arXiv:2306.15595): every frequency is divided by ``factor``.

    Raises:
        ValueError: the factor is below 1.
    """

    rope_type = "linear"

    factor: float

    def __post_init__(self):
        _number("LinearScaling", "factor", self.factor, 1)

    def context(self, declared: int) -> int:
        return declared


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScaling(RopeRule):
    """Dynamic NTK: the base of the frequencies grows with the text, from ``original_max_position_embeddings`` tokens on.

    Raises:
        ValueError: the factor is below 1, or the number of tokens is not positive.
    """

    rope_type = "dynamic"

    factor: float
    original_max_position_embeddings: int  # `max_position_embeddings` of config.json: longer texts are stretched

    def __post_init__(self):
        _number("DynamicScaling", "factor", self.factor, 1)
        _tokens("DynamicScaling", self.original_max_position_embeddings)

    def context(self, declared: int) -> int:
        return int(declared * self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeRule):
    """YaRN (arXiv:2309.00071), static: fast frequencies stay, slow ones are divided by ``factor``, and logits are scaled.

    Raises:
        ValueError: a number is out of its range.
    """

    rope_type = "yarn"

    factor: float
    original_max_position_embeddings: int  # tokens of the old context
    attention_factor: float | None = None  # scales cosine and sine; None: from `factor` and the two mscales
    beta_fast: float = 32.0  # a frequency with more turns in the old context stays
    beta_slow: float = 1.0  # a frequency with fewer turns in the old context is divided by `factor`
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # whether the bounds between the two kinds are whole channels

    def __post_init__(self):
        _number("YarnScaling", "factor", self.factor, 1)
        _tokens("YarnScaling", self.original_max_position_embeddings)
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if vars(self)[name] is not None:
                _number("YarnScaling", name, vars(self)[name], 0)
        for name in ("beta_fast", "beta_slow"):
            _number("YarnScaling", name, vars(self)[name], 0)
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"YarnScaling: expected 0 < beta_slow <= beta_fast, got {self.beta_slow!r} and {self.beta_fast!r}"
            )
        if not isinstance(self.truncate, bool):
            raise ValueError(f"YarnScaling: truncate must be true or false, got {self.truncate!r}")

    def context(self, declared: int) -> int:
        # Qwen's instructions add the rule to a file and leave its number of positions as it was.
        return max(declared, int(self.original_max_position_embeddings * self.factor))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRopeScaling(RopeRule):
    """LongRoPE (arXiv:2402.13753): a divisor for each frequency, and a second one for texts longer than the old context.

    Raises:
        ValueError: a number is out of its range.
    """

    rope_type = "longrope"

    short_factor: tuple[float, ...]  # D/2 divisors, in texts of at most `original_max_position_embeddings` tokens
    long_factor: tuple[float, ...]  # D/2 divisors, in longer texts
    original_max_position_embeddings: int  # tokens of the old context
    factor: float  # the context became longer by this factor; only the attention factor reads it
    attention_factor: float | None = None  # scales cosine and sine; None: from `factor`

    def __post_init__(self):
        _number("LongRopeScaling", "factor", self.factor, 0)
        _tokens("LongRopeScaling", self.original_max_position_embeddings)
        if self.attention_factor is not None:
            _number("LongRopeScaling", "attention_factor", self.attention_factor, 0)
        for name in ("short_factor", "long_factor"):
            if not isinstance(vars(self)[name], tuple):
                raise ValueError(f"LongRopeScaling: {name} must be a tuple of numbers, got {vars(self)[name]!r}")
            for value in vars(self)[name]:
                _number("LongRopeScaling", name, value, 1e-6)
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                "LongRopeScaling: short_factor and long_factor must have one length, "
                f"got {len(self.short_factor)} and {len(self.long_factor)}"
            )

    def context(self, declared: int) -> int:
        return declared


RULES = {rule.rope_type: rule for rule in (RopeScaling, LinearScaling, DynamicScaling, YarnScaling, LongRopeScaling)}
_REQUIRED = {"llama3": None, "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
             "longrope": ("short_factor", "long_factor")}  # None: all fields  # fmt: skip


def read(hf: dict[str, Any], default_theta: float = 10000.0) -> tuple[float, RopeRule | None]:
    """Read the base of RoPE and its rule from ``config.json``, with the keys of transformers 4 or 5.

    Args:
        hf: the file as a dict, with ``max_position_embeddings``.
        default_theta: the base if the file has none.

    Raises:
        ValueError: the rule is unknown, lacks a parameter, or has a parameter that this library does not read.
    """
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    known = ("default", *RULES)
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"unsupported rope scaling {rope!r}, expected one object with rope_type")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in known:
        raise ValueError(f"unsupported rope scaling {rope!r}, expected rope_type one of {', '.join(known)}")
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"unsupported partial_rotary_factor {partial!r}, expected 1.0")
    theta = rope.get("rope_theta", hf.get("rope_theta", default_theta))
    if kind == "default":
        _refuse_others(kind, rope, ())
        return theta, None
    rule = RULES[kind]
    names = [field.name for field in dataclasses.fields(rule)]
    _refuse_others(kind, rope, names)
    # A yarn that says "factor": null takes it from the two lengths, as in transformers; one that says nothing is refused.
    stated = {name for name, value in rope.items() if value is not None or kind == "yarn"}
    absent = [name for name in _REQUIRED[kind] or names if name not in stated]
    if absent:
        raise ValueError(f"rope scaling of type {kind!r} lacks {', '.join(absent)}, got {rope!r}")
    given = {name: rope[name] for name in names if rope.get(name) is not None}
    positions = hf["max_position_embeddings"]
    if kind == "dynamic":  # transformers begins to stretch here, whatever value the rule has
        if given.setdefault("original_max_position_embeddings", positions) != positions:
            raise ValueError(
                f"rope scaling of type 'dynamic' begins at max_position_embeddings={positions}, "
                f"got original_max_position_embeddings={given['original_max_position_embeddings']!r}"
            )
    elif kind != "linear":
        # A value outside of the rule takes precedence over the rule's own value.
        outer = hf.get("original_max_position_embeddings")
        if outer is not None:
            given["original_max_position_embeddings"] = outer
        given.setdefault("original_max_position_embeddings", positions)
    if kind in ("yarn", "longrope") and "factor" not in given:
        _tokens(rule.__name__, given["original_max_position_embeddings"])
        given["factor"] = positions / given["original_max_position_embeddings"]
    for name in ("short_factor", "long_factor"):
        if isinstance(given.get(name), list):
            given[name] = tuple(given[name])
    for name in ("beta_fast", "beta_slow"):
        if not given.get(name, 1):  # zero means the default, as in transformers
            del given[name]
    return theta, rule(**given)


def _refuse_others(kind: str, rope: dict[str, Any], names: Any) -> None:
    """Refuse parameters that the rule does not have: whoever wrote them meant something by them."""
    others = [key for key, value in rope.items() if value is not None and key not in (*_FREE, *_NOTES, *names)]
    if others:
        expected = ", ".join(names) or "none"
        raise ValueError(f"rope scaling of type {kind!r} has unsupported {', '.join(others)}, expected {expected}")


def write(rule: RopeRule | None) -> dict[str, Any]:
    """Return the rule as an object of ``config.json``, without the base."""
    if rule is None:
        return {"rope_type": "default"}
    given = {field.name: vars(rule)[field.name] for field in dataclasses.fields(rule)}
    numbers = {name: list(x) if isinstance(x, tuple) else x for name, x in given.items() if x is not None}
    if rule.rope_type == "dynamic":
        del numbers["original_max_position_embeddings"]  # it is the config's max_position_embeddings
    return {"rope_type": rule.rope_type, **numbers}
