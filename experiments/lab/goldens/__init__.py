"""Makers of the goldens in ``tests/goldens``, one for each program that they come from; run from the root of a clone."""

from __future__ import annotations

import json
import pathlib
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parents[3] / "tests" / "goldens"


def write(name: str, golden: dict[str, Any]) -> None:
    """Write ``golden`` as ``tests/goldens/kvjax/NAME.json``, in one line."""
    (FOLDER / "kvjax" / f"{name}.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
