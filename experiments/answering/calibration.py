"""CHESS's thresholds, calibrated on full-attention generations that begin at held-out prompts."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from experiments.answering.ask import pad
from experiments.answering.model import LoadedModel
from experiments.benchmarks import Cell, Encoded, Reading, encode_cell
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

    def within(self, window: int) -> Self:
        """Shorten prompts that would leave no room for their generation in a model's window."""
        return dataclasses.replace(self, length=min(self.length, max(window - self.new_tokens, 1)))

    @property
    def cells(self) -> list[Cell]:
        """The cells of the prompts, one of each task."""
        each = -(-self.prompts // len(self.tasks))
        return [Cell(task, self.length, each, self.seed + CALIBRATION_SEED) for task in self.tasks]


def calibration_tokens(calibration: Calibration, encode: Callable[[Cell], Encoded]) -> tuple[np.ndarray, np.ndarray]:
    """Encode held-out prompts, int32 [prompts, length], padded on the right; and their lengths, int32 [prompts]."""
    prompts = [encode(cell).wholes for cell in calibration.cells]
    rows = [tokens[index] for index in range(len(prompts[0])) for tokens in prompts][: calibration.prompts]
    return pad(rows, calibration.length)


def needs_thresholds(name: str, knobs: Mapping[str, Any]) -> bool:
    """Tell whether the method is CHESS, with a trigger that needs the thresholds of `chess_thresholds`."""
    return name == "chess" and knobs.get("trigger", "and") in ("and", "or")


def chess_thresholds(
    model: LoadedModel, calibration: Calibration, results: Results, encode: Callable[[Cell], Encoded] | None = None
) -> dict[str, float]:
    """Calibrate CHESS's thresholds and return them as knobs.

    A record that holds those of the same calibration gives them again. ``encode`` encodes the prompts; None takes the model's
    tokenizer without a template.
    """
    calibration = calibration.within(model.config.max_position_embeddings)
    settings = {**dataclasses.asdict(calibration), "tasks": list(calibration.tasks)}
    stored = results.notes.get("chess_calibration")
    if stored is None or stored["settings"] != settings:
        for task in calibration.tasks:
            get_task(task)
        encode = encode or functools.partial(encode_cell, Reading(model.tokenizer_file))
        tokens, lengths = calibration_tokens(calibration, encode)
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
