"""Replaces knobs of methods from the command line, where a budget may be a share of the length."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.answering import knobs_by_method, read_knobs
from experiments.evaluation.settings import Choice


def set_knobs(choices: Sequence[Choice], pairs: Sequence[str]) -> tuple[Choice, ...]:
    """Set knobs of some methods by texts ``method.knob=value``; a method that is not among ``choices`` is refused."""
    results = tuple(choices)
    for name, knobs in knobs_by_method(pairs, read_knobs).items():
        if not any(choice.name == name for choice in results):
            raise ValueError(f"--set names {name!r}, which is none of the methods {', '.join(c.name for c in results)}")
        results = tuple(Choice(c.name, {**c.knobs, **knobs}) if c.name == name else c for c in results)
    return results
