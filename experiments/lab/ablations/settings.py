"""The settings of `experiments.lab.ablations`."""

from __future__ import annotations

import dataclasses
import difflib

from experiments.answering import ModelSettings
from experiments.cli import names, option
from experiments.lab.ablations.plans import NAMES
from experiments.tasks import get_task


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationSettings(ModelSettings):
    """The settings of `experiments.lab.ablations`.

    Attributes:
        names: comma-separated, or 'all': strategy, extrapolate, channels, chess, sentences, votes, theta, chunk, hashing and
            drift
        base: the model whose distance from Full and whose drift are measured, and which runs beyond its window (default: the
            model)
        samples: samples of each cell
        length: tokens of prompt and answer (default: the model's window, at most 8192)
        tasks: comma-separated, instead of each ablation's own tasks
        solved: Full's score in percent below which a task is left out of a table (default: 85; 50 beyond the window)
        template: auto uses the checkpoint's chat template, if it has one; none does not
        seed: seed of the samples
        trained_length: tokens; extrapolation goes to 2, 4 and 8 times this length (default: the base's window)
        texts: texts along which the distance is measured
        text_tokens: tokens of a text along which the distance is measured
        calibration_prompts: prompts that CHESS is calibrated on
        new_tokens: tokens that Full writes, for calibration and for CHESS's triggers
        batch_tokens: rows x length generated together
        workers: processes that make prompts
        processes: ablations that run at a time, on the same device

    Raises:
        ValueError: an unknown ablation or task, or a number below 1.
    """

    names: tuple[str, ...] = option(positional=True, read=names)
    base: str | None = None
    samples: int = 16
    length: int | None = None
    tasks: tuple[str, ...] = ()
    solved: float | None = None
    template: str = option("auto", choices=("auto", "none"))
    seed: int = 0
    trained_length: int | None = None
    texts: int = 16
    text_tokens: int = 128
    calibration_prompts: int = 16
    new_tokens: int = 512
    batch_tokens: int = 131072
    workers: int = 2
    processes: int = 1

    def __post_init__(self) -> None:
        for name in self.ablations:
            if name not in NAMES:
                close = difflib.get_close_matches(name, NAMES, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ValueError(f"unknown ablation {name!r}{hint}; ablations: {', '.join(NAMES)}")
        for task in self.tasks:
            get_task(task)  # refuses unknown names
        if self.solved is not None and not 0 <= self.solved <= 100:
            raise ValueError(f"solved must lie in [0, 100] percent, got {self.solved}")
        numbers = (
            "samples", "length", "trained_length", "texts", "text_tokens", "calibration_prompts", "new_tokens",
            "batch_tokens", "processes",
        )  # fmt: skip
        for field in numbers:
            if (value := vars(self)[field]) is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")

    @property
    def ablations(self) -> tuple[str, ...]:
        """The names of the ablations to run."""
        return NAMES if self.names == ("all",) else self.names
