"""Runs an evaluation: Full first, then every method, cell by cell, into a result folder.

A cell that the folder already has is skipped, so the same command goes on where it was interrupted; other methods, tasks and
lengths join the same folder.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

import models
from experiments.answering.cell import LoadedModel
from experiments.answering.presets import Calibration, Setting, chess_thresholds, needs_thresholds, question_place
from experiments.evaluation.answering import Batch, answer_cell, make_batches
from experiments.suites import Cell, CellStore, Reading
from experiments.evaluation.comparison import BASELINE
from experiments.evaluation.folder import Folder, read_predictions
from experiments.evaluation.perplexity import make_texts, score_texts
from experiments.evaluation.settings import Choice, Settings, to_yaml
from experiments.records.resumable import knobs_of
from experiments.suites.base import Example
from experiments.suites.readers import files_of, parse, read
from experiments.tasks import expand, get_task
from kvjax.method import Method
from kvjax.timing import CompileClock

_CALIBRATED_ON = "niah_single_2"


@dataclasses.dataclass(frozen=True)
class Job:
    """One cell under one method, not yet in the folder."""

    label: str
    setting: Setting
    place: str
    cell: Cell
    identity: dict[str, Any]


def make_cells(settings: Settings) -> list[Cell]:
    """The cells of the settings, files read, in the order of the tasks.

    Tasks of a group that need a file nobody gave are left out; so are depths of tasks that have none.
    """
    made = []
    for spec in settings.tasks:
        if spec in settings.files:
            by_task: dict[str, list[Example]] = {}
            name, path = parse(spec)
            for file in files_of(name, path):
                for example in _contexts(read(f"{name}:{file}"), settings.samples):
                    by_task.setdefault(example.task, []).append(example)
            made += [Cell(task, None, settings.samples, source=spec, given=tuple(x)) for task, x in by_task.items()]
            continue
        for length in settings.lengths:
            if spec == "perplexity":
                text = settings.haystack_of(spec) or "prose"
                made.append(Cell(spec, length, settings.samples, settings.seed, text))
                continue
            for name in expand((spec,)):
                kind, task = settings.haystack_of(name), get_task(name)
                if task.needs_file and kind is None:  # it came with a group, and nobody brought its file
                    continue
                questions = min(settings.questions, task.max_questions or settings.questions)
                for depth in (settings.depths if task.takes_depth else ()) or (None,):
                    made.append(Cell(name, length, settings.samples, settings.seed, kind, depth, questions))
    return list({tuple(cell.identity.values()): cell for cell in made}.values())


def _contexts(examples: Sequence[Example], count: int) -> list[Example]:
    """All questions about the first ``count`` contexts of each task, those about one context together."""
    made: dict[str, dict[Any, list[Example]]] = {}
    for index, example in enumerate(examples):
        made.setdefault(example.task, {}).setdefault(example.group or index, []).append(example)
    kept = (list(groups.values())[:count] for groups in made.values())
    return [example for groups in kept for group in groups for example in group]


class Runner:
    """An evaluation of one model.

    Args:
        settings: what to run.
        model: the model.
        directory: its checkpoint directory, for the chat template.
        out: the result folder.
        force: throw away what the folder holds.
        progress: whether to show a progress bar.

    Attributes:
        cells: what is asked.
        store: their examples as token ids.
        folder: the result folder.

    Raises:
        ValueError: unknown names, settings that do not fit together or do not fit what the folder holds.
    """

    def __init__(
        self,
        settings: Settings,
        model: LoadedModel,
        directory: pathlib.Path,
        out: pathlib.Path,
        *,
        force: bool = False,
        progress: bool = True,
    ) -> None:
        limit = settings.max_length or model.config.max_position_embeddings
        longest = max(settings.lengths, default=0)
        if settings.generated and longest > limit:
            raise ValueError(
                f"lengths must be at most {limit} tokens, what {model.name} was made for or max_length says, got {longest}; "
                f"max_length={longest} reads positions that it was not trained for"
            )
        if limit > model.config.max_position_embeddings:
            model = dataclasses.replace(model, config=dataclasses.replace(model.config, max_position_embeddings=limit))
        self.settings, self.model, self._limit = settings, model, limit
        self.progress = progress
        template = models.ChatTemplate.from_directory(directory) if settings.template == "auto" else None
        self._reading = Reading(
            model.tokenizer_file,
            template.around(settings.system, **settings.template_variables) if template else None,
            self._limit,
            settings.truncation,
            settings.max_new_tokens,
        )
        common = {
            "model": model.name,
            "dtype": model.config.dtype,
            "template": template.identity if template else None,
            "system": settings.system,
            "template_variables": dict(settings.template_variables),
            "eos_token_ids": list(model.config.eos_token_ids),
            "truncation": settings.truncation,
            "max_length": self._limit,
            "max_new_tokens": settings.max_new_tokens,
            "decoding": "greedy",
        }
        self.folder = Folder(out, "eval", common, to_yaml(settings), {**common, "settings": settings.as_dict()}, force)
        self.cells = make_cells(settings)
        self.store = CellStore(
            self._reading, [cell for cell in self.cells if cell.task != "perplexity"], settings.workers
        )

    def run(self) -> None:
        """Runs every cell that the folder does not have."""
        jobs = self._jobs()
        total = len(self.settings.choices) * len(self.cells)
        self._say(f"{len(jobs)} cells to run, {total - len(jobs)} in {self.folder.path}")
        begun = time.monotonic()
        with CompileClock() as clock, tqdm(total=len(jobs), unit="cell", disable=not self.progress) as bar:
            for job in jobs:
                bar.set_description(f"{job.label} {job.cell.title}")
                self.folder.results.read()
                if self.folder.find(job.identity) is not None:  # another process has made it
                    bar.update()
                    continue
                self._same_examples(job.cell)
                row, predictions = self.measure(job.cell, job.setting.method, job.place, clock)
                row = {**row, **job.identity, "budget": job.identity["knobs"].get("budget"), "note": job.setting.note}
                self.folder.add(row, job.identity, predictions)
                self._say(
                    f"{time.monotonic() - begun:7.1f} s  {job.label:24s} {job.cell.title:24s} "
                    f"{row['value']:7.2f} {row['unit']:10s} {row['seconds']:6.1f} s, compiling {row['compile_seconds']:.1f} s"
                    + ("  NO EFFECT: it attended to every token" if row["no_effect"] and job.label != "full" else "")
                )
                bar.set_postfix_str(f"{row['value']:.1f}")
                bar.update()

    def _same_examples(self, cell: Cell) -> None:
        """Refuses a cell whose file has changed since Full answered it: they could not be compared."""
        full = self.folder.find({"method": BASELINE, **cell.identity})
        if full is None or cell.task == "perplexity" or not (cell.source or ":" in (cell.haystack or "")):
            return
        answered = {line["key"] for line in read_predictions(self.folder.path, full)}
        if answered != set(self.store[cell].keys):
            raise ValueError(
                f"{cell.source or cell.haystack} has changed since Full answered {cell.title} in {self.folder.path}: "
                "choose another --out, or begin anew with --force"
            )

    def measure(
        self, cell: Cell, method: Method, place: str, clock: CompileClock
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """One cell under a method: its row without the method's name, and one prediction per example."""
        if cell.task == "perplexity":
            return score_texts(
                self.model,
                self._texts(cell),
                method,
                length=cell.length,
                batch_tokens=self.settings.batch_tokens,
                clock=clock,
            )
        batches = self._batches(cell, method, place)
        return answer_cell(self.model, self.store[cell], method, place, batches, clock, self.settings.max_new_tokens)

    def _texts(self, cell: Cell) -> np.ndarray:
        return make_texts(
            self.model.tokenizer,
            cell.haystack,
            cell.length,
            self.settings.perplexity_tokens,
            cell.samples,
            cell.seed,
        )

    def _batches(self, cell: Cell, method: Method, place: str) -> list[Batch]:
        limit = None if method.extrapolates else self._limit
        return make_batches(self.store[cell], place, self.settings.batch_tokens, limit, self.settings.max_new_tokens)

    def _jobs(self) -> list[Job]:
        """Full's cells, then every method's."""
        made = []
        for choice in self.settings.choices:
            for cell in self.cells:
                setting = self.setting(choice, cell)
                place = self.place(setting.method, cell)
                identity = {
                    "method": choice.label,
                    "knobs": knobs_of(setting.method),
                    "question": place,
                    **cell.identity,
                }
                if cell.task == "perplexity":
                    identity["scored_tokens"] = self.settings.perplexity_tokens
                if self.folder.find(identity) is None:
                    made.append(Job(choice.label, setting, place, cell, identity))
        return made

    def place(self, method: Method, cell: Cell) -> str:
        """Where a cell's questions stand under a method."""
        if cell.task == "perplexity":
            return "none"
        return question_place(method, self.settings.question)

    def setting(self, choice: Choice, cell: Cell) -> Setting:
        """The method of a choice at a cell's length."""
        length = cell.length
        if length is None:
            # Budgets that are shares of the context go by the examples as they are.
            length = int(np.mean([len(ids) for ids in self.store[cell].wholes]))
        extra: Mapping[str, Any] = {}
        if needs_thresholds(choice.name, choice.knobs):
            extra = self._chess()
        return choice.at(length, self.model.tokenizer, self.model.config, extra)

    def _chess(self) -> dict[str, float]:
        """CHESS' thresholds, from other prompts of the tasks that the shipped model knows, at the shortest length."""
        generated = [t for t in expand(self.settings.generated) if t in expand(("trained",))]
        length = min(self.settings.lengths, default=2048)
        calibration = Calibration(tuple(generated) or (_CALIBRATED_ON,), length, 16, 512, self.settings.seed)
        if "chess_calibration" not in self.folder.results.notes:
            self._say(f"calibrating CHESS on {calibration.prompts} other prompts of {length} tokens")
        return chess_thresholds(self.model, calibration, self.folder.results)

    def _say(self, line: str) -> None:
        if self.progress:
            tqdm.write(line, file=sys.stderr)  # standard output is for results
