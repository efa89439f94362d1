"""What `experiments.ablations` runs: its settings."""

from __future__ import annotations

import dataclasses
import difflib

from experiments.ablations.plans import ABLATIONS
from experiments.answering import ModelSettings
from experiments.cli import names, option
from experiments.tasks import get_task


@dataclasses.dataclass(frozen=True)
class AblationSettings(ModelSettings):
    """What `experiments.ablations` runs.

    Attributes:
        names: comma-separated, or 'all': votes, theta, extrapolate, sentences, chess, channels, hashing, causes
        samples: samples of each cell
        length: tokens of prompt and answer
        tasks: comma-separated, instead of each ablation's own
        seed: seed of the samples
        trained_length: extrapolation goes to 2, 4 and 8 times this
        calibration_prompts: prompts that CHESS is calibrated on
        new_tokens: tokens written for calibration and agreement
        batch_tokens: rows x length generated together
        workers: processes that make prompts

    Raises:
        ValueError: an unknown ablation or task, or a number below 1.
    """

    names: tuple[str, ...] = option(positional=True, parse=names)
    samples: int = 20
    length: int = 8192
    tasks: tuple[str, ...] = ()
    seed: int = 0
    trained_length: int = 16384
    calibration_prompts: int = 16
    new_tokens: int = 512
    batch_tokens: int = 131072
    workers: int = 4

    def __post_init__(self) -> None:
        for name in self.ablations:
            if name not in ABLATIONS:
                close = difflib.get_close_matches(name, ABLATIONS, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ValueError(f"unknown ablation {name!r}{hint}; ablations: {', '.join(ABLATIONS)}")
        for task in self.tasks:
            get_task(task)  # refuses unknown names
        numbers = ("samples", "length", "trained_length", "calibration_prompts", "new_tokens", "batch_tokens")
        for field in numbers:
            if (value := vars(self)[field]) < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")

    @property
    def ablations(self) -> tuple[str, ...]:
        """The names of the ablations to run."""
        return tuple(ABLATIONS) if self.names == ("all",) else self.names
