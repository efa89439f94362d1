"""Makes tables of papers again on a model of ours: do the systems lose and gain alike, and come in the same order?

Model, prompts and length differ from the paper's, so scores cannot be compared. The order, and the signs of the differences
to Full, can be.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments.cli import parse_yaml
from experiments.evaluation.comparison import BASELINE, Entry
from experiments.evaluation.order import Change, Difference, changed_places, difference, kendall_tau, mean_scores
from experiments.evaluation.printed import PrintedPart, PrintedTable, printed_tables
from experiments.tasks import expand

_FILE = "remade.yaml"


@dataclasses.dataclass(frozen=True)
class Remade:
    """How a table of a paper is made again.

    Attributes:
        title: the title, which is unique.
        about: how the paper's budgets and tasks became ours.
        tables: the printed tables, one for each model.
        record: name of the result folder or ablation that has our rows.
        lengths: lengths of our cells.
        printed_lengths: the columns of a printed table that has means at lengths.
        tasks: pairs of a printed task and our task for it; None takes the tasks that both have. With "" as the printed task,
            our tasks stand for the printed mean.
        settings: for each setting's name, the labels of our rows by the labels of the printed rows.
        left_out: the reasons why printed rows have no row of ours, by the printed label.
    """

    title: str
    about: str
    tables: tuple[PrintedTable, ...]
    record: str
    lengths: tuple[int, ...]
    printed_lengths: tuple[int, ...]
    tasks: tuple[tuple[str, str], ...] | None
    settings: Mapping[str, Mapping[str, str]]
    left_out: Mapping[str, str]

    @property
    def rows(self) -> list[str]:
        """The labels of the printed rows that are shown, in the paper's order."""
        shown = {label for setting in self.settings.values() for label in setting} | self.left_out.keys()
        return [label for label in self.tables[0].rows if label in shown]


@dataclasses.dataclass(frozen=True)
class System:
    """A printed row beside our row.

    Attributes:
        label: label of the printed row.
        ours: label of our row.
        printed: the printed score, a mean over tasks.
        printed_loss: the printed score less Full's, see `PrintedPart.difference`; None if the paper does not print Full.
        done: number of cells that our row has.
        score: our score; None unless our row has all cells.
        loss: our score less Full's; None unless our row has all cells.
    """

    label: str
    ours: str
    printed: float
    printed_loss: Difference | None
    done: int
    score: float | None
    loss: Difference | None

    @property
    def sign(self) -> str:
        """Whether both differences to Full have the same sign: "same", "opposite", or "within noise" if either may be zero.

        "" if the paper does not print Full, or if we have no row.
        """
        if self.printed_loss is None or self.loss is None:
            return ""
        if not (self.printed_loss.beyond_noise and self.loss.beyond_noise):
            return "within noise"
        return "same" if np.sign(self.printed_loss.mean) == np.sign(self.loss.mean) else "opposite"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A printed table beside our rows at one setting.

    Attributes:
        part: the part of the printed table that our rows stand for.
        setting: the setting's name.
        full: our score of Full.
        cells: number of cells of a whole row of ours.
        systems: the rows, in the paper's order.
        changes: the pairs of systems that change places, pairs beyond noise first.
    """

    part: PrintedPart
    setting: str
    full: float
    cells: int
    systems: tuple[System, ...]
    changes: tuple[Change, ...]

    @property
    def compared(self) -> list[System]:
        """The systems that have a score of ours."""
        return [system for system in self.systems if system.score is not None]

    @property
    def tau(self) -> float:
        """Kendall's tau-b of the printed and our order; NaN with fewer than two systems, or only ties."""
        both = self.compared
        return kendall_tau([x.printed for x in both], [x.score or 0.0 for x in both])


@functools.cache
def remade_tables() -> tuple[Remade, ...]:
    """Read all tables of the file remade.yaml.

    Raises:
        ValueError: an entry names a row that no printed table has.
    """
    text = importlib.resources.files(__package__).joinpath(_FILE).read_text(encoding="utf-8")
    return tuple(_remade(entry) for entry in parse_yaml(text))


def _remade(entry: Mapping[str, Any]) -> Remade:
    mine = [table for table in printed_tables() if (table.paper, table.suite) == (entry["paper"], entry["suite"])]
    tables = tuple(table for table in mine if table.model in entry.get("models", [table.model]))
    settings = {name: dict(rows) for name, rows in entry.get("settings", {}).items()}
    if own := entry.get("own"):
        settings["as in the main table"] = {label: label.partition(" ")[0] for label in own}
    left_out = entry.get("left_out", {})
    known = dict.fromkeys(label for table in tables for label in table.rows)
    for label in (*left_out, *(label for rows in settings.values() for label in rows)):
        if label not in known:
            raise ValueError(f"{entry['title']}: expected a printed row, one of {', '.join(known)}, got {label!r}")
    tasks = entry.get("tasks")
    if isinstance(tasks, Mapping):
        pairs: tuple[tuple[str, str], ...] | None = tuple(tasks.items())
    else:
        pairs = None if tasks is None else tuple(("", name) for name in expand(tuple(tasks)))
    lengths = tuple(entry["lengths"])
    columns = tuple(entry.get("printed_lengths", lengths))
    about, title, record = (entry[name] for name in ("about", "title", "record"))
    return Remade(title, about, tables, record, lengths, columns, pairs, settings, left_out)


def verdicts(remade: Remade, entries: Sequence[Entry]) -> list[Verdict]:
    """Compare the printed tables with our rows, at each setting.

    Args:
        remade: what to compare.
        entries: our rows with their examples, including rows of Full.

    Returns:
        A verdict for each printed table and setting; none for a table without a cell of Full on its tasks.
    """
    full = [
        entry
        for entry in entries
        if entry.row["method"] == BASELINE
        and entry.row["length"] in remade.lengths
        and entry.row.get("question", "prefill") == "prefill"
    ]
    have, made = {entry.row["name"] for entry in full}, []
    ours = functools.cache(functools.partial(difference, entries))  # the same for all models of the paper
    for table in remade.tables:
        pairs = [pair for pair in remade.tasks or zip(table.tasks, table.tasks, strict=True) if pair[1] in have]
        names = {name for _, name in pairs}
        cells = tuple(dict.fromkeys(entry.cell for entry in full if entry.row["name"] in names))
        part = PrintedPart(table, tuple(printed for printed, _ in pairs if printed), remade.printed_lengths)
        for setting, rows in remade.settings.items() if cells else ():
            made.append(_verdict(part, setting, rows, entries, cells, ours))
    return made


def _verdict(
    part: PrintedPart,
    setting: str,
    rows: Mapping[str, str],
    entries: Sequence[Entry],
    cells: tuple[tuple, ...],
    ours: Callable[[str, str, tuple[tuple, ...]], Difference],
) -> Verdict:
    """Compare a printed table with our rows; ``ours`` returns the difference of two of our rows over some cells."""
    scores, systems = mean_scores(entries, cells), []
    for label, mine in ((label, rows[label]) for label in part.table.rows if label in rows):
        printed_loss = part.difference(label, BASELINE) if BASELINE in part.table.rows else None
        done = len({entry.cell for entry in entries if entry.row["method"] == mine} & set(cells))
        loss = ours(mine, BASELINE, cells) if mine in scores else None
        systems.append(System(label, mine, part.value(label), printed_loss, done, scores.get(mine), loss))
    changes = changed_places(
        {system.label: system.printed for system in systems},
        {system.label: system.score for system in systems if system.score is not None},
        lambda one, other: (part.difference(one, other), ours(rows[one], rows[other], cells)),
    )
    return Verdict(part, setting, scores[BASELINE], len(cells), tuple(systems), tuple(changes))
