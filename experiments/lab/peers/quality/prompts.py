"""The prompts of a result folder as token ids, and the scores that kvjax's methods have on them. No device is needed."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import models
from experiments.answering import LoadedModel, budget_tokens
from experiments.benchmarks import Encoded, encode_cell
from experiments.cli import read_record
from experiments.evaluation.cells import make_cells, make_reading
from experiments.evaluation.comparison import BASELINE, Entry, load
from experiments.evaluation.settings import EvaluationSettings
from experiments.lab.peers.quality.settings import METHODS, PeersSettings, beside
from experiments.records import percent_interval
from models.files import gguf as gguf_files
from models.files.directories import locate_gguf, read_json


@dataclasses.dataclass(frozen=True)
class Asked:
    """The prompts of a cell, and kvjax's rows on them.

    Attributes:
        encoded: the first samples of the cell.
        budget: tokens that a press keeps of every prompt, per KV head.
        new_tokens: most tokens of an answer; None takes the examples' own.
        ours: kvjax's rows on these samples.
    """

    encoded: Encoded
    budget: int
    new_tokens: int | None
    ours: tuple[dict[str, Any], ...]


def find_weights(folder: pathlib.Path, weights: pathlib.Path | None, beside_record: pathlib.Path) -> pathlib.Path:
    """Find the model of a result folder in Hugging Face's layout; convert a GGUF file if there is none.

    Args:
        folder: the result folder.
        weights: the directory or GGUF file to take instead of the folder's model.
        beside_record: the directory that a GGUF file is converted to, unless it exists.

    Raises:
        FileNotFoundError: the model is not on this machine.
        OSError, ValueError: the file cannot be converted.
    """
    source = str(weights or EvaluationSettings.from_yaml(folder / "config.yaml").model)
    file = locate_gguf(source, offline=True)
    if file is None:
        return models.checkpoint_directory(source, offline=True)
    if not beside_record.is_dir():
        print(f"converting {file} to {beside_record}", flush=True)
        gguf_files.convert(file, beside_record, dtype="bfloat16")
    return beside_record


def read_model(folder: pathlib.Path, directory: pathlib.Path) -> LoadedModel:
    """Read the tokenizer and the configuration of a result folder's model, without its weights."""
    answered = read_record(folder)["settings"]
    config = models.ModelConfig.from_hf(read_json(directory / "config.json"), answered["dtype"])
    config = dataclasses.replace(config, eos_token_ids=tuple(answered["eos_token_ids"]))
    tokenizer = models.load_tokenizer(directory, config)
    return LoadedModel(answered["model"], None, config, tokenizer, directory / "tokenizer.json")


def read_prompts(folder: pathlib.Path, settings: PeersSettings, model: LoadedModel) -> list[Asked]:
    """Make the prompts of a folder's cells again, and check that they are the prompts that kvjax answered.

    Args:
        folder: the result folder.
        settings: which cells, and how many samples.
        model: see `read_model`.

    Raises:
        ValueError: the folder has no such cell, or its prompts were others.
    """
    chosen = EvaluationSettings.from_yaml(folder / "config.yaml")
    answered = read_record(folder)["settings"]
    template = models.ChatTemplate.from_directory(model.directory) if chosen.template == "auto" else None
    if (identity := template.identity if template else None) != answered["template"]:
        raise ValueError(f"{folder} has prompts of the template {answered['template']}, got {identity} in {model.directory}")
    reading = make_reading(chosen, model.tokenizer_file, template, answered["max_length"])
    entries = [entry for entry in load([folder]) if entry.row["question"] == "prefill"]
    cells = []
    for cell in make_cells(chosen):
        if cell.length is None or (settings.tasks and cell.task not in settings.tasks):
            continue
        mine = [entry for entry in entries if all(entry.row.get(name) == at for name, at in cell.identity.items())]
        full = next((entry for entry in mine if entry.row["method"] == BASELINE), None)
        if full is None:
            continue
        encoded = _first(encode_cell(reading, cell), settings.samples)
        if absent := [key for key in encoded.keys if key not in full.scores]:
            raise ValueError(
                f"{folder}: {cell.title} has other prompts here than kvjax answered, {len(absent)} of {len(encoded.keys)}"
            )
        budget = budget_tokens(settings.budget, cell.length)
        ours = tuple(_row(entry, encoded, budget) for entry in mine if _stands_beside(entry.row, budget))
        cells.append(Asked(encoded, budget, chosen.max_new_tokens, ours))
    if not cells:
        raise ValueError(f"{folder} has no generated cell that Full answered with the question in the prompt")
    return cells


def _first(encoded: Encoded, samples: int) -> Encoded:
    parts = ("examples", "heads", "tails", "wholes", "cut", "keys")
    return dataclasses.replace(encoded, **{name: vars(encoded)[name][:samples] for name in parts})


def _stands_beside(row: Mapping[str, Any], budget: int) -> bool:
    """Tell whether a row is of Full, or of a method that a press stands for, at the budget."""
    base = row["method"].partition("(")[0]
    if base == BASELINE:
        return True
    return any(base in beside(method) for method in METHODS) and row.get("knobs", {}).get("budget") == budget


def _row(entry: Entry, encoded: Encoded, budget: int) -> dict[str, Any]:
    scores = {key: entry.scores[key] for key in encoded.keys}
    return {
        **scored(encoded, list(scores.values())),
        "library": "kvjax",
        "method": entry.row["method"],
        "base": entry.row["method"].partition("(")[0],
        "budget": budget,
        "error": None,
    }


def scored(encoded: Encoded, scores: Sequence[float]) -> dict[str, Any]:
    """Make the fields of a row that say how well a cell's samples were answered, from scores between 0 and 1."""
    return {
        "name": encoded.cell.task,
        "length": encoded.cell.length,
        "samples": len(scores),
        "value": round(100 * float(np.mean(scores)), 2),
        "unit": "percent",
        "interval_95": percent_interval(scores),
        "scores": dict(zip(encoded.keys, scores, strict=True)),
    }
