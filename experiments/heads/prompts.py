"""Prompts of a task for measurements of a model, with other seeds than the seeds that commands score."""

import dataclasses

from jsonargparse.typing import PositiveInt

from experiments.answering import CALIBRATION_SEED, LoadedModel, ModelSettings
from experiments.benchmarks import Cell, Encoded, Reading, encode_cell
from experiments.tasks import get_task


@dataclasses.dataclass(frozen=True)
class PromptSettings(ModelSettings):
    """The prompts of a measurement.

    Attributes:
        task: task of the prompts
        haystack: 'noise', 'prose', 'code' or file:PATH (default: the task's own)
        length: tokens of prompt and answer
        samples: prompts
        seed: seed of the samples; commands score other samples under the same seed

    Raises:
        ValueError: an unknown task.
    """

    task: str = "niah_single_2"
    haystack: str | None = None
    length: PositiveInt = 2048
    samples: PositiveInt = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for task in self.task.split(","):
            get_task(task)


def encode_prompts(model: LoadedModel, settings: PromptSettings) -> Encoded:
    """Make the prompts as tokens of a model, which must have as many positions."""
    model.check_positions("--length", settings.length)
    haystack = settings.haystack if get_task(settings.task).haystack else None
    cell = Cell(settings.task, settings.length, settings.samples, settings.seed + CALIBRATION_SEED, haystack)
    return encode_cell(Reading(model.tokenizer_file), cell)
