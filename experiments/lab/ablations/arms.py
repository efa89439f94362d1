"""The rows and tables of ablations, and the values that all ablations share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import models
from experiments.answering import LoadedModel, paper_method
from experiments.benchmarks import Cell, Reading, encode_cell
from experiments.lab.ablations.settings import AblationSettings
from experiments.records import Results
from kvjax import registry
from kvjax.protocol.method import Method

# Names of cells that `experiments.lab.ablations.distance` measures: KL along held-out prose, and along text that Full writes.
PROSE, WRITTEN = "prose", "written"
DISTANCES = (PROSE, WRITTEN)
WRITTEN_TASK = "niah_multikey_1"  # Full continues prompts of this task: it goes on asking and answering
SOLVED = 85.0  # Full's score, in percent, below which a task says little about a method


@dataclasses.dataclass(frozen=True)
class Lab:
    """The values that all tables of an ablation share.

    Attributes:
        settings: what to run.
        model: the model that does the tasks.
        base: the model whose distance from Full is measured, and which runs beyond its window; it may be `model`.
        results: the record of the ablation, which also keeps thresholds.
    """

    settings: AblationSettings
    model: LoadedModel
    base: LoadedModel
    results: Results

    @property
    def length(self) -> int:
        """The tokens of prompt and answer."""
        return self.settings.length_of(self.model)

    @property
    def trained_length(self) -> int:
        """The longest context that the base was trained on."""
        return self.settings.trained_length or self.base.config.max_position_embeddings

    def reading(self, model: LoadedModel) -> Reading:
        """Choose how a model's prompts become tokens."""
        chat = models.ChatTemplate.from_directory(model.directory) if self.settings.template == "auto" else None
        return Reading(model.tokenizer_file, chat.around() if chat else None)

    def pick(self, *tasks: str) -> tuple[str, ...]:
        """Return the tasks of a table: those of the settings, or else ``tasks``."""
        return self.settings.tasks or tasks

    def method(self, name: str, length: int | None = None, **knobs: Any) -> Method:
        """Make a method at its paper's budget, scaled to the length; ``knobs`` replace the paper's knobs."""
        return paper_method(
            name, length or self.length, tokenizer=self.model.tokenizer, config=self.model.config, given=knobs
        ).method

    def prompts(self, task: str, samples: int) -> tuple[tuple[int, ...], ...]:
        """Make prompts of a task at the lab's length, as token ids, in this process."""
        return encode_cell(self.reading(self.base), Cell(task, self.length, samples, self.settings.seed)).wholes


@dataclasses.dataclass(frozen=True)
class Arm:
    """A row of a table: a method on tasks.

    Attributes:
        name: unique in its table.
        setting: the varied values, JSON values by name; claims compare arms that differ in one of the values.
        method: the method.
        tasks: the columns: names of tasks, and of `DISTANCES`.
        length: tokens of prompt and answer.
        samples: samples of each cell.
        model: the model that does the tasks.
    """

    name: str
    setting: Mapping[str, Any]
    method: Method
    tasks: tuple[str, ...]
    length: int
    samples: int
    model: LoadedModel


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows to compare.

    Attributes:
        title: unique in its ablation.
        text: says how the rows differ.
        arms: the rows; Full first, if the table has tasks.
        solved: Full's score in percent below which a task is left out of the table.
    """

    title: str
    text: str
    arms: tuple[Arm, ...]
    solved: float = SOLVED


Methods = dict[str, tuple[dict[str, Any], Method]]  # setting and method by the row's name


def table(
    lab: Lab, title: str, text: str, tasks: tuple[str, ...], methods: Methods, distances: tuple[str, ...] = (PROSE,)
) -> Table:
    """Make a table whose rows differ only in their methods; Full's row comes first, if there are tasks."""
    full = Arm("full", {"method": "full"}, registry.make("full"), tasks, lab.length, lab.settings.samples, lab.model)
    arms = [
        Arm(name, setting, method, (*tasks, *distances), lab.length, lab.settings.samples, lab.model)
        for name, (setting, method) in methods.items()
    ]
    return Table(title, text, (*([full] if tasks else []), *arms))
