"""Wrappers by name, and methods as text: ``twilight(quest)``, ``periodic(snapkv, interval=128)``, or both in one another."""

import ast
import re
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
from kvjax.wrappers.reuse import Reuse
from kvjax.wrappers.sparse_prefill import Prefill
from kvjax.wrappers.twilight import Twilight

WRAPPERS: Mapping[str, type[Method]] = types.MappingProxyType(
    {
        cls.__name__.lower(): cls
        for cls in (Twilight, Reuse, Periodic, Prefill, Stages, DenseBelow, LayerBudgets, PerLayer, Verified, FromJudge)
    }
)
# Names of papers whose method is `Prefill` at the knobs beside them, and what the paper's patterns are.
PATTERNS: Mapping[str, tuple[Mapping[str, Any], str]] = types.MappingProxyType(
    {
        "minference": ({}, "arXiv:2407.02490, vertical and slash lines in blocks of 64 tokens"),
        "xattention": ({"block": 128, "pattern": {"kind": "xattention"}}, "arXiv:2503.16428, blocks by antidiagonals"),
        "blasst": ({"pattern": {"kind": "blasst"}}, "arXiv:2512.12087, blocks above a threshold"),
        "flexprefill": (
            {"block": 128, "window": 128, "pattern": {"kind": "flexprefill"}},
            "arXiv:2502.20766, each head by lines or by blocks",
        ),
    }
)
EXAMPLES: Mapping[str, str] = types.MappingProxyType(  # as commands and `kvjax.make` take them
    {
        "twilight": "twilight(quest, mass=0.85)",
        "reuse": "reuse(quest, every=4)",
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
    fields = {}
    for name, hint in typing.get_type_hints(cls).items():
        if name in cls.__dataclass_fields__:
            by_layer = typing.get_origin(hint) is dict and _is_method(typing.get_args(hint)[1])
            if by_layer or _is_method(hint):
                fields[name] = by_layer
    return fields


def _is_method(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Method)


def split_call(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Split the text of a method into its name and the texts between its brackets, each with its knob, or "" without one.

    ``twilight(quest(budget=64), mass=0.85)`` is twilight with ("", "quest(budget=64)") and ("mass", "0.85").

    Raises:
        ValueError: brackets that do not match, an empty part, or text after the last bracket.
    """
    if text.count("(") > _BRACKETS:
        raise ValueError(f"expected at most {_BRACKETS} '(' in the text of a method, got {text.count('(')}: {text[:40]}...")
    if "(" not in text:
        return text.strip(), []
    # Python parses the brackets. What stands between them need not be Python (1/8, a file, the index of a layer), so each
    # letter of it becomes an x, and each "=" a "<": comparisons may stand before other arguments, and places stay the same.
    try:
        call = ast.parse(re.sub("[^(),=]", "x", text).replace("=", "<"), mode="eval").body
    except SyntaxError:
        call = None

    pairs = []
    for part in call.args if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ():
        source = text[part.col_offset : part.end_col_offset]
        knob, _, value = source.partition("=") if isinstance(part, ast.Compare) else ("", "", source)
        pairs.append((knob.strip(), value.strip()))
    if not pairs or not all(value for _, value in pairs):
        raise ValueError(f"expected a method as NAME(METHOD, KNOB=VALUE), such as twilight(quest, mass=0.85), got {text!r}")
    return text.partition("(")[0].strip(), pairs
