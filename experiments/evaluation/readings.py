"""Tells settings that read a paper in another way than the default from settings that change a budget alone."""

from __future__ import annotations

# Knobs that are no budgets, by method, as they stand in a row's label.
_KNOBS = {"chess": ("centred=", "hierarchy="), "sentencekv": ("prefilter=", "kernel="), "tokenselect": ("chunk=",)}


def other_reading(label: str) -> bool:
    """Tell whether a row's method, such as ``chess(hierarchy=False)``, is another reading of its paper than the default."""
    name, _, knobs = label.partition("(")
    return any(knob in knobs for knob in _KNOBS.get(name, ()))
