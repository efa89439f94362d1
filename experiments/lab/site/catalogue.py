"""Tables of what the packages hold: the operations of `pallas_kernels`, and the families of models that load."""

import importlib
import inspect

import pallas_kernels
from experiments.records import markdown_rows
from models.files.tables import family_table
from models.files.tables.families import MISSING
from pallas_kernels.dispatch import XLA, Operation

_PLATFORMS = {"gpu": "GPU", "tpu": "TPU"}


def operations() -> str:
    """Make a table for each room, from the operations' docstrings and their tables of implementations."""
    lines: list[str] = []
    for room in pallas_kernels.ROOMS:
        body = []
        for name, at in sorted((name, at) for at, name in pallas_kernels.operations() if at.split(".")[0] == room):
            module = importlib.import_module(f"pallas_kernels.{at}.{name}")
            text = " ".join((inspect.getdoc(vars(module)[name]) or "").split("\n\n")[0].split())
            body.append((f"`{name}`", text.replace("|", "\\|").replace("``", "`"), _kernels(vars(module)[name.upper()])))
        lines += [f"## {room}", "", *markdown_rows([("operation", "what it computes", "kernels besides `xla`"), *body]), ""]
    return "\n".join(lines).rstrip()


def families() -> str:
    """Make a table of every ``model_type`` that loads, and one of those that are refused."""
    head = ("`model_type`", "models", "parts beside Llama's", "refused")
    rows = [(f"`{row.model_type}`", row.models, row.parts or "-", row.refused or "-") for row in family_table.rows()]
    refused = [("refused `model_type`", "because this decoder does not have")]
    refused += [(f"`{kind}`", part) for kind, part in MISSING.items()]
    return "\n".join([*markdown_rows([head, *rows]), "", *markdown_rows(refused)])


def _kernels(operation: Operation) -> str:
    """Write the implementations other than plain JAX, with their platforms."""
    entries = {name: entry.platforms for name, entry in operation.implementations.items() if name != XLA}
    on = {name: " and ".join(_PLATFORMS.get(x, x) for x in platforms) or "everywhere" for name, platforms in entries.items()}
    return ", ".join(f"`{name}` ({where})" for name, where in on.items())
