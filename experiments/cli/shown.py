"""What ``kvjax COMMAND --help`` and ``kvjax ls`` show, kept as text, so that a new process need not import JAX to show it.

`python -m experiments.site docs --tables` writes the file; a test compares it with what the commands themselves say.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import io
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

FILE = pathlib.Path(__file__).with_name("shown.json")
COLUMNS = "80"  # of a terminal for which the texts are made
_ELSEWHERE = ("lm-eval",)  # commands whose help another package writes


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


def shown_texts() -> dict[pathlib.Path, str]:
    """Ask all commands for what the file holds; return the file and its text."""
    from experiments.cli.ls import entries
    from experiments.cli.main import COMMANDS

    asked = {name: _asked(command.module) for name, command in COMMANDS.items() if name not in _ELSEWHERE}
    methods = [entry for entry in entries() if not entry["outside"]]
    return {FILE: json.dumps({"help": asked, "methods": methods}, indent=1, ensure_ascii=False) + "\n"}


def _asked(module: str) -> str:
    said, before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = COLUMNS  # which argparse reads
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            importlib.import_module(module).main(["--help"])
    finally:
        os.environ.pop("COLUMNS")
        os.environ |= {} if before is None else {"COLUMNS": before}
    return said.getvalue()


def _is_fresh() -> bool:
    """Tell whether nothing was imported that could know more than the file."""
    return "kvjax" not in sys.modules


@functools.cache
def _kept() -> dict[str, Any]:
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}
