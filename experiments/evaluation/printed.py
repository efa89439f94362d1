"""Sets the scores that the papers print beside a result folder's scores, and says which cells are comparable."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.answering import budget_tokens
from experiments.cli import parse_yaml
from experiments.evaluation.comparison import BASELINE, Compared
from experiments.evaluation.order import Difference
from experiments.records import markdown_rows, method_title
from experiments.tasks import GROUPS, expand

_FILE = "printed.yaml"
_ABOUT = (
    "Scores that papers print for the same model and task, beside ours. Comparable: same model, length and knobs; \"open\": "
    "as far as the paper prints its setting. Loss: against Full on the same cell. Samples, prompts and scorers are never "
    "quite the same, so the loss says more than the score."
)


@dataclasses.dataclass(frozen=True)
class PrintedRow:
    """A line of a printed table: a method at a setting.

    Attributes:
        label: unique in the table: the method's name, and words that tell its settings apart.
        knobs: the setting as the paper prints it.
        open: the part of the setting that the paper does not print; "" if nothing is missing.
        scores: in percent, by task; empty if the paper prints means only.
        mean: the printed mean over the tasks; None if the paper prints no mean.
        means: the printed means, by length.
    """

    label: str
    knobs: Mapping[str, Any]
    open: str
    scores: Mapping[str, float]
    mean: float | None
    means: Mapping[int, float]

    @property
    def method(self) -> str:
        """The method's name; kvjax may have no method of this name."""
        return self.label.partition(" ")[0]


@dataclasses.dataclass(frozen=True)
class PrintedTable:
    """A table of a paper, of one model.

    Attributes:
        paper: the paper's method.
        suite: the suite of the tasks.
        source: the paper's table or section.
        model: the model as the paper names it.
        models: names of checkpoints that are or may be this model.
        length: tokens of prompt and answer; None where prompts have lengths of their own, or a row has means at lengths.
        samples: number of samples of each task; None if it is not known.
        tasks: the tasks.
        rows: by label, in the paper's order.
    """

    paper: str
    suite: str
    source: str
    model: str
    models: tuple[str, ...]
    length: int | None
    samples: int | None
    tasks: tuple[str, ...]
    rows: Mapping[str, PrintedRow]


@dataclasses.dataclass(frozen=True)
class PrintedPart:
    """A part of a printed table, over which means are taken.

    Attributes:
        table: the table.
        tasks: the tasks of a table with scores; an empty tuple takes all tasks.
        lengths: the columns of a table with means at lengths.
    """

    table: PrintedTable
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]

    def value(self, label: str) -> float:
        """Return the printed score of a row: the mean over the part, or else the printed mean.

        Raises:
            ValueError: the row has neither.
        """
        row = self.table.rows[label]
        if row.means:
            return float(np.mean([row.means[length] for length in self.lengths]))
        if row.scores:
            return float(np.mean(self._scores(label)))
        if row.mean is None:
            raise ValueError(f"{self.table.paper}, {self.table.source}: {label} has no printed number")
        return row.mean

    def difference(self, one: str, other: str) -> Difference:
        """Subtract the printed score of row ``other`` from the printed score of row ``one``.

        The interval is zero where the table does not say how many samples it has. Otherwise it is too wide rather than too
        narrow. It assumes that answers are right or wrong, which varies most, and that the answers of the two rows are
        independent, although both rows answer the same questions.
        """
        variance = 0.0
        for label in (one, other) if self.table.samples else ():
            each = self._scores(label) if self.table.rows[label].scores else np.asarray([self.value(label)])
            variance += float(np.sum(each * (100 - each))) / (self.table.samples or 1) / len(each) ** 2
        return Difference(self.value(one) - self.value(other), 1.96 * math.sqrt(variance))

    def _scores(self, label: str) -> np.ndarray:
        scores = self.table.rows[label].scores
        return np.asarray([scores[task] for task in self.tasks or scores])


@dataclasses.dataclass(frozen=True)
class Printed:
    """A number that a paper prints.

    Attributes:
        table: the table with the number.
        row: the row with the number.
        length: tokens of prompt and answer; None where prompts have lengths of their own.
        tasks: one task, or all tasks of the printed mean.
        value: the printed number, in percent.
        full: the printed number of Full; None if the paper does not print it.
    """

    table: PrintedTable
    row: PrintedRow
    length: int | None
    tasks: tuple[str, ...]
    value: float
    full: float | None


@functools.cache
def printed_tables() -> tuple[PrintedTable, ...]:
    """Read all tables of the file printed.yaml."""
    text = importlib.resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    return tuple(_table(entry) for entry in parse_yaml(text))


def _table(entry: Mapping[str, Any]) -> PrintedTable:
    tasks = tuple(name for task in entry["tasks"] for name in (expand((task,)) if task in GROUPS else (task,)))
    rows = {
        label: PrintedRow(
            label=label,
            knobs=row.get("knobs", {}),
            open="; ".join(filter(None, (entry.get("open"), row.get("open")))),
            scores=dict(zip(tasks, map(float, row.get("scores", ())), strict="scores" in row)),
            mean=row.get("mean"),
            means=dict(zip(entry.get("lengths", ()), map(float, row.get("means", ())), strict=True)),
        )
        for label, row in entry["rows"].items()
    }
    common = {name: entry[name] for name in ("paper", "suite", "source", "model")}
    common |= {name: entry.get(name) for name in ("length", "samples")}
    return PrintedTable(**common, models=tuple(entry["models"]), tasks=tasks, rows=rows)


@functools.cache
def printed() -> tuple[Printed, ...]:
    """Read all numbers of the file printed.yaml."""
    return tuple(number for table in printed_tables() for row in table.rows.values() for number in _numbers(table, row))


def _numbers(table: PrintedTable, row: PrintedRow) -> list[Printed]:
    """List the numbers of a row: its scores and its means."""
    base = table.rows.get(BASELINE, PrintedRow(BASELINE, {}, "", {}, None, {}))
    made = [Printed(table, row, table.length, (x,), value, base.scores.get(x)) for x, value in row.scores.items()]
    if row.mean is not None:
        made.append(Printed(table, row, table.length, table.tasks, row.mean, base.mean))
    return made + [Printed(table, row, x, table.tasks, value, base.means.get(x)) for x, value in row.means.items()]


def beside(compared: Sequence[Compared], model: str) -> str:
    """Format our cells beside the printed numbers of the same model, as Markdown.

    Args:
        compared: our rows, see `experiments.evaluation.comparison.beside_full`.
        model: name of our model, with or without the owner of its repository.
    """
    checkpoint = model.rpartition("/")[2].lower()  # a repository's name has its owner in front
    known = [number for number in printed() if checkpoint in (name.lower() for name in number.table.models)]
    if not known:
        names = dict.fromkeys(f"{table.model} ({table.paper})" for table in printed_tables())
        return f"The papers print no score for {model}. They print scores for {', '.join(names)}."
    rows = [row for number in known for row in _rows(number, compared)]
    if not rows:
        return f"None of these cells has a task and a method for which a paper prints a score of {model}."
    head = ("method", "task", "length", "ours", "loss", "printed", "loss", "at", "comparable", "source")
    return "\n".join([_ABOUT, "", *markdown_rows([head, *rows])])


def _rows(number: Printed, compared: Sequence[Compared]) -> list[Sequence[str]]:
    """Format our cells with a printed number's method and tasks, at its length or, if we have none there, at all lengths."""
    groups: dict[tuple, dict[str, Compared]] = {}
    for item in compared:
        row = item.row
        if row["method"].partition("(")[0] == number.row.method and row["unit"] == "percent" and row.get("depth") is None:
            groups.setdefault((row["length"], row["method"], row["question"]), {})[row["name"]] = item
    whole = {key: cells for key, cells in groups.items() if all(task in cells for task in number.tasks)}
    same = {key: cells for key, cells in whole.items() if key[0] == number.length}
    made = []
    for (length, label, question), cells in (same or whole).items():
        items = [cells[task] for task in number.tasks]
        ours = sum(item.row["value"] for item in items) / len(items)
        loss = sum(item.difference for item in items) / len(items)
        full = number.row.method == BASELINE
        made.append(
            (
                method_title(label),
                number.tasks[0] if len(number.tasks) == 1 else f"mean of {len(number.tasks)}",
                _tokens(length),
                f"{ours:.1f}",
                "" if full else f"{loss:+.1f}",
                f"{number.value:.2f}",
                "" if full or number.full is None else f"{number.value - number.full:+.1f}",
                _tokens(number.length),
                _comparable(number, length, items[0].row, question),
                f"{number.table.paper}, {number.table.source}",
            )
        )
    return made


def _tokens(length: int | None) -> str:
    return "as given" if length is None else f"{length:,}"


def _comparable(number: Printed, length: int | None, row: Mapping[str, Any], question: str) -> str:
    """Return "yes", "open" with the unprinted part of the setting, or "no" with the differences."""
    wrong = [] if length == number.length else ["length"]
    if question != "prefill":
        wrong.append("the question stands behind the compressed prompt")
    unsaid = [number.row.open] if number.row.open else []
    for knob, value in number.row.knobs.items():
        mine = row["knobs"].get(knob)
        if knob == "budget" and value < 1 and length is None:
            unsaid.append(f"budget {mine}, printed {value} of each prompt")
        elif mine != (budget_tokens(value, length) if knob == "budget" and length else value):
            wrong.append(f"{knob} {mine}, printed {value}")
    if wrong:
        return "no: " + "; ".join(wrong)
    return "open: " + "; ".join(unsaid) if unsaid else "yes"
