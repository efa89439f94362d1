"""CHESS's thresholds, calibrated on full-attention generations that begin at held-out prompts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.answering.ask import pad
from experiments.answering.model import LoadedModel
from experiments.benchmarks import Cell, Reading, encode_cell
from experiments.records import Results
from experiments.tasks import get_task
from kvjax import registry
from kvjax.api.calibrate_chess import calibrate_chess

CALIBRATION_SEED = 1_000_003  # added to the samples' seed, so that calibration and measurement use different prompts


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The generations that CHESS's thresholds come from; they continue past the end of an answer.

    Attributes:
        tasks: names of tasks, which take turns.
        length: tokens of a prompt.
        prompts: number of prompts.
        new_tokens: tokens that are generated after each prompt.
        seed: the seed of the measured samples.
    """

    tasks: tuple[str, ...]
    length: int
    prompts: int
    new_tokens: int
    seed: int


def calibration_tokens(
    model: LoadedModel, calibration: Calibration, reading: Reading | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Encode held-out prompts, int32 [prompts, length], padded on the right; and their lengths, int32 [prompts]."""
    each = -(-calibration.prompts // len(calibration.tasks))
    seed = calibration.seed + CALIBRATION_SEED
    prompts = [
        encode_cell(reading or Reading(model.tokenizer_file), Cell(task, calibration.length, each, seed)).wholes
        for task in calibration.tasks
    ]
    rows = [tokens[index] for index in range(each) for tokens in prompts][: calibration.prompts]
    return pad(rows, calibration.length)


def needs_thresholds(name: str, knobs: Mapping[str, Any]) -> bool:
    """Tell whether the method is CHESS, with a trigger that needs the thresholds of `chess_thresholds`."""
    return name == "chess" and knobs.get("trigger", "and") in ("and", "or")


def chess_thresholds(
    model: LoadedModel, calibration: Calibration, results: Results, reading: Reading | None = None
) -> dict[str, float]:
    """Calibrate CHESS's thresholds and return them as knobs.

    A record that holds those of the same calibration gives them again. Prompts that would leave no room for their generation
    in the model's window are shortened. ``reading`` says how text becomes tokens; None takes the model's tokenizer without a
    template.
    """
    window = model.config.max_position_embeddings - calibration.new_tokens
    calibration = dataclasses.replace(calibration, length=min(calibration.length, max(window, 1)))
    settings = {**dataclasses.asdict(calibration), "tasks": list(calibration.tasks)}
    stored = results.notes.get("chess_calibration")
    if stored is None or stored["settings"] != settings:
        for task in calibration.tasks:
            get_task(task)
        tokens, lengths = calibration_tokens(model, calibration, reading)
        method = calibrate_chess(
            model.params,
            tokens,
            config=model.config,
            method=registry.make("chess"),
            lengths=lengths,
            max_new_tokens=calibration.new_tokens,
            eos_token_ids=(),
        )
        stored = {
            "settings": settings,
            "quantile": 0.99,
            "tau_entropy": method.tau_entropy,
            "tau_varentropy": method.tau_varentropy,
        }
        results.note("chess_calibration", stored)
    return {name: stored[name] for name in ("tau_entropy", "tau_varentropy")}
