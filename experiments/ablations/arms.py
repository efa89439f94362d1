"""The rows and tables of ablations, and the values that all ablations share."""

from __future__ import annotations

import dataclasses
from typing import Any

import models
from experiments.answering import LoadedModel, paper_method
from experiments.records import Results
from experiments.suites import Cell, Reading, encode_cell
from kvjax.method import Method

AGREEMENT = "agreement"  # the task name of cells that `experiments.ablations.agreement` measures
AGREEMENT_TASK = "niah_multikey_1"  # Full writes on from prompts of this task: it goes on asking and answering


@dataclasses.dataclass(frozen=True)
class Lab:
    """The values that all ablations share.

    Attributes:
        model: the model.
        results: the record of the ablation, which also keeps thresholds.
        length: tokens of prompt and answer.
        samples: samples of each cell.
        seed: seed of the samples.
        tasks: tasks that replace each ablation's own; none keeps those.
        trained_length: the longest context that the model was trained on.
        calibration_prompts: prompts that CHESS is calibrated on.
        new_tokens: tokens of the texts for agreement and calibration.
    """

    model: LoadedModel
    results: Results
    length: int
    samples: int
    seed: int
    tasks: tuple[str, ...]
    trained_length: int
    calibration_prompts: int
    new_tokens: int

    def pick(self, *tasks: str) -> tuple[str, ...]:
        """The tasks of a table."""
        return self.tasks or tasks

    def method(self, name: str, length: int | None = None, **knobs: Any) -> Method:
        """A method at its paper's budget, scaled to the length; ``knobs`` go before the paper's."""
        return paper_method(
            name, length or self.length, tokenizer=self.model.tokenizer, config=self.model.config, given=knobs
        ).method

    def prompts(self, task: str, samples: int) -> tuple[tuple[int, ...], ...]:
        """Prompts of a task at the lab's length, as token ids; this process makes them."""
        return encode_cell(Reading(self.model.tokenizer_file), Cell(task, self.length, samples, self.seed)).wholes


@dataclasses.dataclass(frozen=True)
class Arm:
    """A row of a table: a method on tasks.

    Attributes:
        name: unique in its table.
        method: the method.
        tasks: the tasks, a column each.
        length: tokens of prompt and answer.
        samples: samples of each cell.
        config: the model's description.
    """

    name: str
    method: Method
    tasks: tuple[str, ...]
    length: int
    samples: int
    config: models.ModelConfig


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows to compare.

    Attributes:
        title: unique in its ablation.
        text: says how the rows differ.
        arms: the rows.
    """

    title: str
    text: str
    arms: tuple[Arm, ...]


def table(lab: Lab, title: str, text: str, tasks: tuple[str, ...], methods: dict[str, Method]) -> Table:
    """A table whose rows differ only in their methods."""
    return Table(
        title,
        text,
        tuple(Arm(n, m, tasks, lab.length, lab.samples, lab.model.config) for n, m in methods.items()),
    )
