"""What ``kvjax COMMAND --help`` and ``kvjax ls`` show, kept as text, so that a new process need not import JAX to show it.

`python -m experiments.lab.site docs --tables` writes the file (`experiments.cli.showing`). A test compares it with what the
commands themselves say.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

FILE = pathlib.Path(__file__).with_name("shown.json")


def help_of(command: str, rest: Sequence[str]) -> str | None:
    """Return the kept help of a command; None if these arguments ask for something else, or if the command must say it.

    Args:
        command: the command's name.
        rest: the arguments after it.
    """
    if list(rest) not in (["-h"], ["--help"]) or not _is_fresh():
        return None
    return _kept().get("help", {}).get(command)


def methods() -> list[dict[str, Any]] | None:
    """Return what ``kvjax ls --json`` shows of the methods; None if there may be plug-ins, which the file does not have."""
    if not _is_fresh() or importlib.metadata.entry_points(group="kvjax.methods"):
        return None
    return _kept().get("methods")


def _is_fresh() -> bool:
    """Tell whether nothing was imported that could know more than the file."""
    return "kvjax.plugins" not in sys.modules


@functools.cache
def _kept() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
