"""The budget of a row, whatever its method calls it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


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
