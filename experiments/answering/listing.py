"""``kvjax ls models``: list the named models, and where they are."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import models
from experiments.answering.found import find
from experiments.cli import Job


@dataclasses.dataclass(frozen=True)
class ListCommand:
    """How to list.

    Attributes:
        json: print JSON
    """

    json: bool = False


def _list(command: ListCommand) -> None:
    entries = [_entry(model) for model in models.NAMED_MODELS.values()]
    if command.json:
        print(json.dumps(entries, indent=1))
        return
    for entry in entries:
        where = entry["directory"] or f"not on this machine: {entry['download'] / 1e6:.0f} MB to download"
        print(f"{entry['name']}  [{entry['licence']}]\n    {entry['about']}\n    {where}\n")
    print("--model NAME downloads a model that is not on this machine; so does kvjax fetch NAME, and nothing else.")
    print("--model also takes a directory, and a repository OWNER/NAME of the hub.")


def _entry(model: models.NamedModel) -> dict[str, Any]:
    """Describe a model as JSON values."""
    try:
        directory = str(find(model.name, offline=True).directory)
    except (FileNotFoundError, ValueError):  # absent, or not whole: `kvjax fetch` says which
        directory = None
    return {
        "name": model.name,
        "about": model.about,
        "licence": model.licence,
        "download": model.file.download if model.file else 0,
        "directory": directory,
    }


main = Job(_list, ListCommand)
