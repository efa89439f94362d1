"""Wrappers by name, and methods as text: ``twilight(quest)``, ``periodic(snapkv, interval=128)``, or both in one another."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from typing import Any

from kvjax.exact.from_judge import FromJudge
from kvjax.exact.verified import Verified
from kvjax.protocol.method import Method
from kvjax.wrappers.compose import DenseBelow, PerLayer, Stages
from kvjax.wrappers.layer_budgets import LayerBudgets
from kvjax.wrappers.periodic import Periodic
from kvjax.wrappers.sparse_prefill import Prefill
from kvjax.wrappers.twilight import Twilight

WRAPPERS: Mapping[str, type[Method]] = types.MappingProxyType(
    {
        cls.__name__.lower(): cls
        for cls in (Twilight, Periodic, Prefill, Stages, DenseBelow, LayerBudgets, PerLayer, Verified, FromJudge)
    }
)
# Names of papers whose method is `Prefill` at the knobs beside them, and what the paper's patterns are.
PATTERNS: Mapping[str, tuple[Mapping[str, Any], str]] = types.MappingProxyType(
    {
        "minference": ({}, "arXiv:2407.02490, vertical and slash lines in blocks of 64 tokens"),
        "xattention": ({"block": 128, "pattern": {"kind": "xattention"}}, "arXiv:2503.16428, blocks by antidiagonals"),
        "flexprefill": (
            {"block": 128, "window": 128, "pattern": {"kind": "flexprefill"}},
            "arXiv:2502.20766, each head by lines or by blocks",
        ),
    }
)
TITLES: Mapping[str, str] = types.MappingProxyType(  # of `PATTERNS`, as the papers write them
    {"minference": "MInference", "xattention": "XAttention", "flexprefill": "FlexPrefill"}
)
EXAMPLES: Mapping[str, str] = types.MappingProxyType(  # as commands and `kvjax.make` take them
    {
        "twilight": "twilight(quest, mass=0.85)",
        "periodic": "periodic(snapkv, interval=128)",
        "prefill": "prefill(quest, block=128)",
        "stages": "stages(snapkv, quest)",
        "densebelow": "densebelow(quest, length=4096)",
        "layerbudgets": "layerbudgets(snapkv, shares=(1.5, 0.5))",
        "perlayer": "perlayer(snapkv, 0=full, -1=full)",
        "verified": "verified(snapkv, depth=4)",
        "fromjudge": "fromjudge(budget=1024)",
    }
)


_BRACKETS = 50  # of the text of a method; methods in one another need a few


def inner_fields(cls: type[Method]) -> dict[str, bool]:
    """List the fields of a class that hold methods, in order, and whether a field holds a method for each layer index."""
    made = {}
    for name, hint in typing.get_type_hints(cls).items():
        if name in cls.__dataclass_fields__:
            by_layer = typing.get_origin(hint) is dict and _is_method(typing.get_args(hint)[1])
            if by_layer or _is_method(hint):
                made[name] = by_layer
    return made


def _is_method(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Method)


def split_call(text: str) -> tuple[str, list[str]]:
    """Split the text of a method into its name and the parts between its brackets: ``a(b, c=1)`` to a and b, c=1.

    Raises:
        ValueError: brackets that do not match, an empty part, or text after the last bracket.
    """
    if text.count("(") > _BRACKETS:
        raise ValueError(f"expected at most {_BRACKETS} '(' in the text of a method, got {text.count('(')}: {text[:40]}...")
    name, bracket, rest = text.strip().partition("(")
    if not bracket:
        return name.strip(), []
    parts = split_commas(rest[:-1]) if rest.endswith(")") else []
    if not name.strip() or not all(parts) or not parts:
        raise ValueError(f"expected a method as NAME(METHOD, KNOB=VALUE), such as twilight(quest, mass=0.85), got {text!r}")
    return name.strip(), parts


def split_commas(text: str) -> list[str]:
    """Split a text at the commas that stand outside of round brackets; parts lose the spaces around them.

    Raises:
        ValueError: brackets that do not match.
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        if depth < 0:
            break
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise ValueError(f"expected as many '(' as ')' in the text of a method, got {text!r}")
    return [part.strip() for part in parts]


def split_knob(part: str) -> tuple[str, str]:
    """Split a part ``KNOB=VALUE`` at its equals sign; a part without one outside of brackets has the knob ""."""
    knob, equals, value = part.partition("=")
    return (knob.strip(), value.strip()) if equals and "(" not in knob else ("", part)
