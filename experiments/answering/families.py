"""``kvjax ls families``: list the families of models that load, and their parts."""

from __future__ import annotations

import dataclasses
import json
import textwrap

from experiments.cli import Job
from models.files.tables import family_table
from models.files.tables.families import MISSING


@dataclasses.dataclass(frozen=True)
class FamiliesCommand:
    """How to list.

    Attributes:
        json: print JSON
    """

    json: bool = False


def _list(command: FamiliesCommand) -> None:
    rows = family_table.rows()
    if command.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=1))
        return
    for row in rows:
        parts = textwrap.fill(row.parts or "Llama's parts", 100, initial_indent="    ", subsequent_indent="    ")
        refused = f"\n    refused: {row.refused}" if row.refused else ""
        print(f"{row.model_type}  [{row.models}]\n{parts}{refused}\n")
    for kind, part in MISSING.items():
        print(f"{kind} is refused: this decoder does not have {part}")


main = Job(_list, FamiliesCommand)
