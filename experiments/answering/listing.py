"""What `kvjax ls models` and `kvjax ls families` show: the named models and where they are; the families that load."""

import dataclasses
import json
import textwrap
from typing import Any

import models
from experiments.answering.fetch import find
from models.files.tables import family_table
from models.files.tables.families import MISSING


def list_models(as_json: bool) -> str:
    """List the named models."""
    entries = [_entry(model) for model in models.NAMED_MODELS.values()]
    if as_json:
        return json.dumps(entries, indent=1)
    lines = []
    for entry in entries:
        where = entry["directory"] or f"not on this machine: {entry['download'] / 1e6:.0f} MB to download"
        lines.append(f"{entry['name']}  [{entry['licence']}]\n    {entry['about']}\n    {where}\n")
    lines.append("--model NAME downloads a model that is not on this machine; so does kvjax fetch NAME, and nothing else.")
    return "\n".join([*lines, "--model also takes a directory, and a repository OWNER/NAME of the hub."])


def _entry(model: models.NamedModel) -> dict[str, Any]:
    """Describe a model as JSON values."""
    try:
        directory = find(model.name, offline=True)["directory"]
    except (FileNotFoundError, ValueError):  # absent, or not whole: `kvjax fetch` says which
        directory = None
    return {
        "name": model.name,
        "about": model.about,
        "licence": model.licence,
        "download": model.file.size if model.file else 0,
        "directory": directory,
    }


def list_families(as_json: bool) -> str:
    """List the families of models that load, and their parts."""
    rows = family_table.rows()
    if as_json:
        return json.dumps([dataclasses.asdict(row) for row in rows], indent=1)
    lines = []
    for row in rows:
        parts = textwrap.fill(row.parts or "Llama's parts", 100, initial_indent="    ", subsequent_indent="    ")
        refused = f"\n    refused: {row.refused}" if row.refused else ""
        lines.append(f"{row.model_type}  [{row.models}]\n{parts}{refused}\n")
    return "\n".join([*lines, *(f"{kind} is refused: this decoder does not have {part}" for kind, part in MISSING.items())])
