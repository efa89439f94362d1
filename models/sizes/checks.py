"""Checks of the fields of a model's description: each refuses a value in a sentence that names the owner and the field."""

from typing import Any

import numpy as np

_FLOAT32 = float(np.finfo(np.float32).max)  # frequencies and factors are computed in float32


def check_counts(owner: str, least: int = 1, **values: Any) -> None:
    """Refuse values that are not whole numbers of at least ``least`` and below 2**31; a bool is refused too."""
    for name, value in values.items():
        if type(value) is not int or not least <= value < 2**31:
            raise ValueError(f"{owner}: {name} must be a whole number of at least {least} and below 2**31, got {value!r:.60}")


def check_number(owner: str, name: str, value: Any, least: float = 0, most: float = _FLOAT32, zero: bool = False) -> None:
    """Refuse a value that is not a number of ``least`` to ``most``, above 0 unless ``zero``; a bool is refused too."""
    # A comparison, unlike math.isfinite, takes whole numbers of any size.
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (good and least <= value <= most and (value or zero)):
        above = "a finite number of at least" if least or zero else "a positive number, finite and above"
        raise ValueError(f"{owner}: {name} must be {above} {least}, got {value!r:.60}")


def check_flags(owner: str, **values: Any) -> None:
    """Refuse values that are not bools."""
    for name, value in values.items():
        if type(value) is not bool:
            raise ValueError(f"{owner}: {name} must be True or False, got {value!r:.60}")


def check_kind(owner: str, name: str, value: Any, kind: type) -> None:
    """Refuse a value that is neither None nor of a class."""
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{owner}: {name} must be a {kind.__name__} or None, got {value!r:.80}")


def check_layers(owner: str, layers: Any) -> None:
    """Refuse what is no tuple of ascending layers, or an empty one."""
    good = type(layers) is tuple and all(type(layer) is int and layer >= 0 for layer in layers)
    if not good or not layers or list(layers) != sorted(set(layers)):
        raise ValueError(f"{owner}: layers must be a tuple of ascending layer numbers, got {layers!r:.80}")
