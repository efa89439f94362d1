"""The settings of training. Every data worker imports this file, so it imports no JAX."""

import dataclasses
import math
import os
import pathlib
from typing import Any

from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from experiments.cli import Settings, option

SIZES = ("toy", "full")


@dataclasses.dataclass(frozen=True)
class TrainingSettings(Settings):
    """What `experiments.lab.training` trains.

    Attributes:
        text: prose files besides pydoc_data
        tokenizer: directory with tokenizer.json (default: the built-in model's)
        size: model and batch size
        steps: optimiser steps of the whole run (default: the size's)
        seed: seed of parameters and data
    """

    text: tuple[pathlib.Path, ...] = option((), several=True)
    tokenizer: pathlib.Path | None = None
    size: str = option("full", choices=SIZES)
    steps: PositiveInt | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class TrainingCommand:
    """The limits and places of a run.

    Attributes:
        out: checkpoint, log and export go here
        minutes: save and stop after this wall-clock time (default: no limit)
        save_minutes: minutes between checkpoints
        resume: continue from the checkpoint in --out
        workers: data processes; 0 makes the data in this process
    """

    out: pathlib.Path = option()
    minutes: NonNegativeFloat | None = None
    save_minutes: NonNegativeFloat = 4.0
    resume: bool = False
    workers: NonNegativeInt = max(1, min(14, (os.cpu_count() or 1) - 2))

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `experiments.lab.training.trainer.train` that are not of the course."""
        minutes = math.inf if self.minutes is None else self.minutes
        return {name: vars(self)[name] for name in ("save_minutes", "resume", "workers")} | {"minutes": minutes}


@dataclasses.dataclass(frozen=True)
class AdapterSettings(Settings):
    """What `experiments.lab.training.adapter` trains.

    Attributes:
        base: the model that is adapted: a name (see kvjax ls models) or what else --model takes; it must have a chat template
        text: prose files besides pydoc_data
        rank: columns of the adapter's first factors
        stretch: the adapted model's context is longer by this factor
        lengths: comma-separated, tokens of rows; later ones join later
        tokens_per_step: rows x length of a batch
        steps: optimiser steps of the whole run
        peak: highest learning rate
        lm_weight: weight of the distance to the base's predictions of prose, beside the loss of the answers
        seed: seed of the adapter and the data
        offline: never download a base that is not on this machine

    Raises:
        ValueError: a stretch below 1, or no length.
    """

    base: str = "smollm2"
    text: tuple[pathlib.Path, ...] = option((), several=True)
    rank: PositiveInt = 32
    stretch: PositiveFloat = 1.0
    lengths: tuple[PositiveInt, ...] = (2048, 4096, 8192)
    tokens_per_step: PositiveInt = 131072
    steps: PositiveInt = 2000
    peak: PositiveFloat = 2e-3
    lm_weight: NonNegativeFloat = 1.0
    seed: int = 0
    offline: bool = False

    def __post_init__(self) -> None:
        if self.stretch < 1:
            raise ValueError(f"stretch must be at least 1, got {self.stretch}")
        if not self.lengths:
            raise ValueError("lengths must name at least one length, got none")
