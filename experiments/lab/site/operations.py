"""Tables of the operations of `pallas_kernels`: what each computes, and which implementations run where."""

from __future__ import annotations

import importlib
import inspect

import pallas_kernels
from experiments.records import markdown_rows
from pallas_kernels.dispatch import XLA, Operation

_PLATFORMS = {"gpu": "GPU", "tpu": "TPU"}


def tables() -> str:
    """Make a table for each room, from the operations' docstrings and their tables of implementations."""
    lines: list[str] = []
    for room in pallas_kernels.ROOMS:
        body = []
        for name in sorted(name for at, name in pallas_kernels.operations() if at == room):
            module = importlib.import_module(f"pallas_kernels.{room}.{name}")
            text = " ".join((inspect.getdoc(vars(module)[name]) or "").split("\n\n")[0].split())
            body.append((f"`{name}`", text.replace("|", "\\|").replace("``", "`"), _kernels(vars(module)[name.upper()])))
        lines += [f"## {room}", "", *markdown_rows([("operation", "what it computes", "kernels besides `xla`"), *body]), ""]
    return "\n".join(lines).rstrip()


def _kernels(operation: Operation) -> str:
    """Write the implementations other than plain JAX, with their platforms."""
    entries = {name: entry.platforms for name, entry in operation.implementations.items() if name != XLA}
    on = {name: " and ".join(_PLATFORMS.get(x, x) for x in platforms) or "everywhere" for name, platforms in entries.items()}
    return ", ".join(f"`{name}` ({where})" for name, where in on.items())
