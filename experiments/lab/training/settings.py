"""The settings of `experiments.lab.training`. Every data worker imports this file, so it imports no JAX."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib

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

    Raises:
        ValueError: a number of steps below 1.
    """

    text: tuple[pathlib.Path, ...] = option((), several=True)
    tokenizer: pathlib.Path | None = None
    size: str = option("full", choices=SIZES)
    steps: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")


@dataclasses.dataclass(frozen=True)
class TrainingCommand:
    """The limits and places of a call of `experiments.lab.training`.

    Attributes:
        out: checkpoints, log and export go here
        minutes: save and stop after this wall-clock time (default: no limit)
        save_minutes: minutes between checkpoints
        resume: continue from the newest checkpoint in --out
        workers: data processes; 0 makes the data in this process

    Raises:
        ValueError: a number out of its range.
    """

    out: pathlib.Path = option()
    minutes: float | None = None
    save_minutes: float = 4.0
    resume: bool = False
    workers: int = max(1, min(14, (os.cpu_count() or 1) - 2))

    def __post_init__(self) -> None:
        for name in ("minutes", "save_minutes", "workers"):
            value = vars(self)[name]
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must be at least 0, got {value}")

    @property
    def limit(self) -> float:
        """Minutes after which this call ends."""
        return math.inf if self.minutes is None else self.minutes
