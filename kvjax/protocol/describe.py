"""Texts about methods, caches and results: `describe` for messages, and the ``repr`` of caches, generations and statistics.

No text shows a large array. Every text works while its arrays are traced and after they were consumed.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.protocol.fields import Share

_SHOWN = 8  # the most values of an array that a text shows


def is_known(*trees: Any) -> bool:
    """Tell whether all arrays of ``trees`` hold values that Python can read; False if one is traced."""
    return not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))


def tracing() -> bool:
    """Tell whether JAX traces what is called now: then the results of all operations are traced."""
    return isinstance(jax.device_put(0), Tracer)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Run operations on known values at once, inside a trace too.

    `jax.transfer_guard` does not forbid them: they hand constants to the device and read a few numbers back.
    """
    with jax.ensure_compile_time_eval(), jax.transfer_guard("allow"):
        yield


def on_device[T](tree: T) -> T:
    """Hand the numbers and NumPy arrays of a tree to the device, which `jax.transfer_guard` does not forbid here."""
    with at_once():
        return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x), tree)


def describe(method: Any, brief: bool = False) -> str:
    """Write a method as ``Name(field=value, ...)``: a small array by its values, a large array by its dtype and shape.

    Args:
        method: a dataclass; its fields may hold further dataclasses.
        brief: leave out the static fields; dots stand for them.
    """
    fields = [field for field in dataclasses.fields(method) if not (brief and field.metadata.get("static"))]
    values = [(field, vars(method)[field.name]) for field in fields]
    shown = [f"{at.name}={show_value(value, brief)}" for at, value in values if not (value is None and at.default is None)]
    dots = ["..."] * (len(fields) < len(dataclasses.fields(method)))
    return f"{type(method).__name__}({', '.join([*shown, *dots])})"


def count_rows(array: jax.Array) -> str:
    """Write the number of rows of ``array`` [B], for example ``2 rows``."""
    if not isinstance(array, (jax.Array, np.ndarray)):  # a placeholder of a tree that JAX rebuilds
        return "unknown rows"
    return "1 row" if array.shape[:1] in ((), (1,)) else f"{array.shape[0]} rows"


def describe_numbers(array: jax.Array) -> str:
    """Write rounded values [B] as ``5``, ``5 and 7`` or ``5 to 90``; or one word that says why they cannot be read."""
    if (reason := _unreadable(array)) is not None:
        return reason
    numbers = [round(x) for x in np.asarray(array, np.float64).reshape(-1).tolist()]
    if len(set(numbers)) == 1:
        return str(numbers[0])
    return " and ".join(map(str, numbers)) if len(numbers) == 2 else f"{min(numbers)} to {max(numbers)}"


def megabytes(size: int) -> str:
    """Write a number of bytes in MB (10^6 bytes), for example ``268.4 MB``."""
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e6:.3f} MB"


def _unreadable(array: Any) -> str | None:
    """Say why the values of an array cannot be read; None if they can."""
    if not isinstance(array, (jax.Array, np.ndarray, np.generic)):  # a placeholder of a tree that JAX rebuilds
        return "unknown"
    if not is_known(array):
        return "traced"
    if not isinstance(array, jax.Array):
        return None
    if array.is_deleted():
        return "consumed"
    return None if array.is_fully_addressable or array.is_fully_replicated else "elsewhere"  # on another process's devices


def show_value(value: Any, brief: bool) -> str:
    """Write a field of a method as text; ``brief`` leaves out the static fields of methods in it."""
    if type(value) is tuple:
        if (count := len(jax.tree.leaves(value))) > 2 * _SHOWN:
            return f"({count} numbers)"
        return "(" + ", ".join(show_value(inner, brief) for inner in value) + "," * (len(value) == 1) + ")"
    if isinstance(value, Share):
        return repr(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return describe(value, brief)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {show_value(inner, brief)}" for key, inner in value.items()) + "}"
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        if (reason := _unreadable(value)) is not None:
            return reason
        return _rounded(np.asarray(value).tolist()) if value.size <= _SHOWN else f"{value.dtype}{list(value.shape)}"
    return repr(value)


def _rounded(value: Any) -> str:
    """Write a number, or a list of numbers, as text. A float32 does not have more than seven digits."""
    if isinstance(value, list):
        return "[" + ", ".join(map(_rounded, value)) + "]"
    return repr(float(f"{value:.7g}")) if isinstance(value, float) else repr(value)


def with_fields(cls: type) -> str:
    """Write the docstring of a dataclass, with a line for each field that is declared with its meaning."""
    lines = []
    for field in dataclasses.fields(cls):
        if doc := field.metadata.get("doc"):
            kind = "static" if field.metadata.get("static") else "traced"
            default = "" if field.default is dataclasses.MISSING else f", default {field.default!r:.60}"
            lines.append(f"* ``{field.name}`` ({kind}{default}): {doc}")
    return "\n".join([inspect.cleandoc(cls.__doc__ or ""), *(["\nFields:\n"] if lines else []), *lines])
