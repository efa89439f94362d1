"""Random values of all kinds, and rules that say which of them an argument may take."""

from __future__ import annotations

import dataclasses
import decimal
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax

INT32, FLOAT32 = 2**31 - 1, float(np.finfo(np.float32).max)
_NUMBERS: tuple[Any, ...] = (
    math.nan, math.inf, -math.inf, 2**31, 2**40, -(2**40), 10**400, 1e39, -1, -3, 0, 1, 2, 7, 99, 1.5, -0.5, 2.0, 1e-30,
    True, False,
)  # fmt: skip
_OTHERS: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: "12", lambda: "", lambda: "nan", lambda: "full", lambda: b"x", lambda: [], lambda: (), dict,
    lambda: {"a": 1}, object, lambda: int, lambda: len, lambda: 1j, lambda: [[1, 2], [3]], lambda: np.array(["a"]),
    lambda: np.zeros((0,)), lambda: jnp.zeros((0,)), lambda: iter([1]), lambda: ..., lambda: range(3),
    lambda: kvjax.methods.Quest, lambda: kvjax.methods.Full(),
    lambda: decimal.Decimal(3), lambda: np.datetime64("2020-01-01"),
    lambda: nested(50), lambda: np.array([None, 1]), lambda: jax.random.key(0), lambda: np.zeros((2, 2, 2)),
)  # fmt: skip
Rule = Callable[[Any], bool]


def nested(depth: int) -> list:
    """Lists in lists, so deep."""
    made: list = []
    for _ in range(depth):
        made = [made]
    return made


def anything(rng: np.random.Generator) -> Any:
    """A random value: a number in one of many wrappings, or something else."""
    if rng.random() < 0.35:
        return _OTHERS[int(rng.integers(len(_OTHERS)))]()
    value = _NUMBERS[int(rng.integers(len(_NUMBERS)))]
    if type(value) is int and abs(value) < 2**31 and rng.random() < 0.3:
        value = int(rng.integers(-100, 200))
    wraps = [lambda x: x, lambda x: x, lambda x: [x], lambda x: (x, x), lambda x: [x, x], str]
    if type(value) is not int or abs(value) < 2**63:
        wraps += [np.asarray, lambda x: np.asarray(x)[()], lambda x: np.asarray([x, x]), lambda x: np.float32(x)]
    if type(value) is not int or abs(value) < 2**31:
        wraps += [jnp.asarray, lambda x: jnp.asarray([x, x])]
    with np.errstate(over="ignore"):
        return wraps[int(rng.integers(len(wraps)))](value)


def plain(value: Any) -> Any:
    """A scalar of Python, NumPy or JAX as Python's; anything else as it is."""
    scalar = isinstance(value, (np.generic, np.ndarray, jax.Array)) and not value.ndim
    if not scalar or jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    return value.item()


def whole(least: float = -INT32 - 1, most: float = INT32, odd: bool = False) -> Rule:
    """Whole numbers in a range; truth values are none."""
    return lambda x: type(plain(x)) is int and least <= plain(x) <= most and not (odd and plain(x) % 2 == 0)


def finite(least: float = -FLOAT32, most: float = FLOAT32, above: float = -math.inf) -> Rule:
    """Finite numbers in a range."""
    return lambda x: type(plain(x)) in (int, float) and above < plain(x) and least <= plain(x) <= most


def among(*values: Any) -> Rule:
    """Some values, of their own types."""
    return lambda x: any(type(plain(x)) is type(value) and plain(x) == value for value in values)


def either(*rules: Rule) -> Rule:
    """What one of the rules allows."""
    return lambda x: any(rule(x) for rule in rules)


def tuples(rule: Rule, length: int | None = None) -> Rule:
    """Tuples of such values."""
    return lambda x: type(x) is tuple and length in (None, len(x)) and all(map(rule, x))


def arrays(rule: Rule) -> Rule:
    """Arrays all of whose numbers a rule allows."""

    def check(x: Any) -> bool:
        return isinstance(x, (np.ndarray, jax.Array)) and all(map(rule, np.asarray(x).ravel().tolist()))

    return lambda x: not _is_key(x) and check(x)


def rows(count: int, rule: Rule, kind: str = "iu") -> Rule:
    """Lists or arrays of so many numbers."""

    def check(x: Any) -> bool:
        if not isinstance(x, (list, tuple, range, np.ndarray, jax.Array)) or _is_key(x):
            return False
        try:
            read = np.asarray(x)
        except ValueError:
            return False
        return read.shape == (count,) and read.dtype.kind in kind and all(map(rule, read.tolist()))

    return check


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.extended)


none, boolean, nothing = among(None), among(True, False), lambda x: False


@dataclasses.dataclass(frozen=True)
class Argument:
    """Something that takes a value.

    Attributes:
        where: for the report, such as "prefill(max_new_tokens=...)".
        name: the name that a message may have.
        allowed: the rule; values that it allows are not tried.
        call: gives the value to the library.
        more: values that it should refuse, beside random ones.
    """

    where: str
    name: str
    allowed: Rule
    call: Callable[[Any], Any]
    more: tuple[Any, ...] = ()

    def bad_value(self, rng: np.random.Generator) -> Any:
        """A random value that must be refused."""
        while True:
            if self.more and rng.random() < 0.5:
                value = self.more[int(rng.integers(len(self.more)))]
            else:
                value = anything(rng)
            if not self.allowed(value):
                return value


def shown(value: Any) -> str:
    """A value in a few characters."""
    try:
        return f"{type(value).__name__} {value!r:.60}"
    except (ValueError, RecursionError):  # whole numbers of thousands of digits; deep lists
        return type(value).__name__
