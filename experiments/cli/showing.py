"""Asks the commands for what the file of `experiments.cli.shown` keeps."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pathlib

from experiments.cli.ls import entries
from experiments.cli.main import COMMANDS
from experiments.cli.shown import FILE

_COLUMNS = "80"  # of a terminal for which the texts are made
_ELSEWHERE = ("lm-eval",)  # commands whose help another package writes


def shown_texts() -> dict[pathlib.Path, str]:
    """Ask all commands for what the file holds; return the file and its text."""
    asked = {name: _help(command.module) for name, command in COMMANDS.items() if name not in _ELSEWHERE}
    methods = [entry for entry in entries() if not entry["outside"]]
    return {FILE: json.dumps({"help": asked, "methods": methods}, indent=1, ensure_ascii=False) + "\n"}


def _help(module: str) -> str:
    said, before = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = _COLUMNS  # which argparse reads
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            importlib.import_module(module).main(["--help"])
    finally:
        os.environ.pop("COLUMNS")
        os.environ |= {} if before is None else {"COLUMNS": before}
    return said.getvalue()
