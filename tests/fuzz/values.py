"""Values at which readers and checks go wrong."""

import decimal
from typing import Any

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st


def nested(depth: int) -> list:
    """Lists in lists, so deep."""
    lists: list = []
    for _ in range(depth):
        lists = [lists]
    return lists


# ---- what arguments must refuse -----------------------------------------------------------------------------------

INT32 = 2**31 - 1
OBJECTS: st.SearchStrategy[Any] = st.sampled_from((
    lambda: "12", lambda: "", lambda: b"x", dict, lambda: {"a": 1}, object, lambda: int, lambda: len, lambda: 1j, lambda: ...,
    lambda: decimal.Decimal(3),
)).map(lambda make: make())  # fmt: skip
NO_NUMBERS: st.SearchStrategy[Any] = OBJECTS | st.sampled_from((
    lambda: np.array(["a"]), lambda: np.datetime64("2020-01-01"), lambda: nested(50), lambda: np.array([None, 1]),
    lambda: np.zeros((2, 2, 2)), lambda: [["a"], 3],
)).map(lambda make: make())  # fmt: skip
EMPTY: st.SearchStrategy[Any] = st.sampled_from(([], (), np.zeros((0,)), range(0)))


def scalars(numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Draw numbers as Python's scalars, or, where they fit into 32 bits, as NumPy's or JAX's."""
    wraps = st.sampled_from((lambda x: x, np.asarray, lambda x: np.asarray(x)[()], jnp.asarray))
    return st.builds(lambda x, wrap: x if isinstance(x, int) and abs(x) > INT32 else wrap(x), numbers, wraps)


FRACTIONS = scalars(st.sampled_from((1.5, -0.5, 2.0, float("nan"), float("inf"), -float("inf"), True, False)))


def no_count(least: int = 1, most: int = INT32) -> st.SearchStrategy[Any]:
    """Draw what is no whole number from ``least`` to ``most``; None is not drawn."""
    return scalars(_outside(least, most) | st.just(10**400)) | FRACTIONS | NO_NUMBERS


def no_share(most: float) -> st.SearchStrategy[Any]:
    """Draw what is no finite number above 0, or at least 0 where ``most`` is infinite; None is not drawn."""
    outside = st.floats(-1e30, -1e-3) | st.sampled_from((float("nan"), float("inf"), True, False))
    if most < float("inf"):
        outside |= st.floats(most + 1e-3, 1e30) | st.just(0.0)
    return scalars(outside) | OBJECTS


def no_row(rows: int, least: int, most: int) -> st.SearchStrategy[Any]:
    """Draw what is no list of ``rows`` whole numbers from ``least`` to ``most``; None is not drawn."""
    inside = st.integers(least, most)
    others = _outside(least, most) | st.sampled_from((1.0, None, "a", [1]))
    wrong = st.builds(lambda right, other: [*right, other], st.lists(inside, min_size=rows - 1, max_size=rows - 1), others)
    lengths = st.lists(inside, max_size=rows + 2).filter(lambda row: len(row) != rows)
    return wrong | lengths | NO_NUMBERS | scalars(inside)


def _outside(least: int, most: int) -> st.SearchStrategy[int]:
    return st.integers(-(2**40), least - 1) | st.integers(most + 1, 2**40)
