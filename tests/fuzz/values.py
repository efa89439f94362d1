"""Random values and texts of all kinds, and rules that say which values an argument may take."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import kvjax

INT32, FLOAT32 = 2**31 - 1, float(np.finfo(np.float32).max)
_NUMBERS = (
    0, 1, 2, 7, 99, -1, -3, 1.5, -0.5, 2.0, 1e-30, True, False, math.nan, math.inf, -math.inf, 2**31, 2**40, -(2**40),
    10**400, 1e39,
)  # fmt: skip
_WRAPS: tuple[tuple[Callable[[Any], Any], float], ...] = (  # and the whole numbers below which they can be used
    *((wrap, math.inf) for wrap in (lambda x: x, lambda x: x, lambda x: [x], lambda x: (x, x), lambda x: [x, x], str)),
    *((wrap, 2**63) for wrap in (np.asarray, lambda x: np.asarray(x)[()], lambda x: np.asarray([x, x]), np.float32)),
    *((wrap, 2**31) for wrap in (jnp.asarray, lambda x: jnp.asarray([x, x]))),
)
_OTHERS: tuple[Callable[[], Any], ...] = (
    lambda: None, lambda: "12", lambda: "", lambda: "nan", lambda: "full", lambda: b"x", lambda: [], lambda: (), dict,
    lambda: {"a": 1}, object, lambda: int, lambda: len, lambda: 1j, lambda: [[1, 2], [3]], lambda: np.array(["a"]),
    lambda: np.zeros((0,)), lambda: jnp.zeros((0,)), lambda: iter([1]), lambda: ..., lambda: range(3),
    lambda: kvjax.methods.Quest, lambda: kvjax.methods.Full(),
    lambda: decimal.Decimal(3), lambda: np.datetime64("2020-01-01"),
    lambda: nested(50), lambda: np.array([None, 1]), lambda: jax.random.key(0), lambda: np.zeros((2, 2, 2)),
)  # fmt: skip
# Separators that only some readers take for line ends, marks of csv, JSON and templates, letters of one to four bytes.
_LETTERS = (
    "abcdefgh XYZ 0123456789", "\n\t ,;|\"'`\\/", "{}[]()<>%$#*?!~:=&+-_.@^", "éüßøÅñ", "日本語中文，。「」", "עבריתعربي",
    "😀👩\u200d👩\u200d👧🇩🇪", "e\u0301a\u0308", "\u2028\u2029\x85\x0b\x0c\x1c\x1e", "\u00a0\u200b\u202e\ufeff", "ﬁⅫ①ıİſ",
)  # fmt: skip
_PIECES = ("{context}", "$$MASK$$", "<s>", "</s>", "\\n", "nan", "''", '""', "[1]", "a,b", "%s", "${HOME}", "\r\n")
Rule = Callable[[Any], bool]


def nested(depth: int) -> list:
    """Lists in lists, so deep."""
    lists: list = []
    for _ in range(depth):
        lists = [lists]
    return lists


def anything() -> st.SearchStrategy[Any]:
    """Draw a number in one of many wrappings, or something else."""
    numbers = st.sampled_from(_NUMBERS) | st.integers(-100, 200)
    return st.builds(_wrapped, numbers, st.sampled_from(_WRAPS)) | st.sampled_from(_OTHERS).map(lambda make: make())


def _wrapped(value: Any, wrap: tuple[Callable[[Any], Any], float]) -> Any:
    with np.errstate(over="ignore"):
        return value if type(value) is int and abs(value) >= wrap[1] else wrap[0](value)


def texts(most: int = 40) -> st.SearchStrategy[str]:
    """Draw texts of at least one character, of the letters at which readers of files, tokenizers and paths go wrong."""
    plain, odd = st.sampled_from(_LETTERS[0]), st.sampled_from(_LETTERS).flatmap(st.sampled_from)
    return st.lists(plain | odd | odd | st.sampled_from(_PIECES), min_size=1, max_size=most).map("".join)


def visible_texts() -> st.SearchStrategy[str]:
    """Draw what a reference can be: it has a letter and is no list, no number and no word for an absent value."""
    return st.integers(0, 10**6).map(lambda x: f"w{x}") | texts(12).map(lambda text: f"a{text}z")


def shown(value: Any) -> str:
    """A value in a few characters."""
    try:
        return f"{type(value).__name__} {value!r:.60}"
    except (ValueError, RecursionError):  # whole numbers of thousands of digits; deep lists
        return type(value).__name__


# ---- rules --------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A scalar of Python, NumPy or JAX as Python's; anything else as it is."""
    scalar = isinstance(value, (np.generic, np.ndarray, jax.Array)) and not value.ndim
    return value.item() if scalar and not is_key(value) else value


def is_key(value: Any) -> bool:
    """Tell whether a value is an array of random keys."""
    return isinstance(value, jax.Array) and bool(jnp.issubdtype(value.dtype, jax.dtypes.extended))


def whole(least: float = -INT32 - 1, most: float = INT32) -> Rule:
    """Whole numbers in a range; truth values are none."""
    return lambda x: type(plain(x)) is int and least <= plain(x) <= most


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
    is_array = lambda x: isinstance(x, (np.ndarray, jax.Array)) and not is_key(x)  # noqa: E731
    return lambda x: is_array(x) and all(map(rule, np.asarray(x).ravel().tolist()))


def rows(count: int, rule: Rule, kind: str = "iu") -> Rule:
    """Lists or arrays of so many numbers."""

    def check(x: Any) -> bool:
        if not isinstance(x, (list, tuple, range, np.ndarray, jax.Array)) or is_key(x):
            return False
        try:
            read = np.asarray(x)
        except ValueError:
            return False
        return read.shape == (count,) and read.dtype.kind in kind and all(map(rule, read.tolist()))

    return check


none, boolean, nothing = among(None), among(True, False), lambda x: False
