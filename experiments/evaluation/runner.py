"""Runs an evaluation into a result folder: Full, then every method, cell by cell.

A cell that the folder already has is skipped, so the same command continues an interrupted run. Other methods, tasks and
lengths join the folder, and with more samples a cell's further contexts. Methods that attend to a prompt densely prefill it
together.
"""

import collections
import dataclasses
import functools
import gc
import pathlib
import sys
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from experiments.answering import (
    Calibration,
    Choice,
    LoadedModel,
    Setting,
    chess_thresholds,
    forms_asked,
    mesh_axes,
    mesh_text,
    needs_thresholds,
    programs,
    resolve_question,
    without_effect,
)
from experiments.benchmarks import Cell, CellStore
from experiments.evaluation.ahead import CompileAhead
from experiments.evaluation.answers import answer_cell, reads_code, with_room
from experiments.evaluation.cells import make_cells, make_reading, without_file
from experiments.evaluation.folder import Folder
from experiments.evaluation.plan import Group, Job, Plan
from experiments.evaluation.same_examples import check_answered, from_file
from experiments.evaluation.settings import EvaluationSettings
from experiments.records import CompileClock, Timer, check_library, knobs_of
from experiments.tasks import expand, library_origin
from kvjax import registry
from kvjax.decoding.layers import check_quantisable, layer_methods
from models.hub.progress import is_drawn, progress_bar

_PAUSE = 0.02  # seconds between looks at what has compiled


class Runner:
    """An evaluation of one model.

    Args:
        settings: what to run.
        model: the model.
        out: the result folder.
        cells: the cells of the settings, if `make_cells` has made them before.
        force: throw away what the folder holds.
        progress: whether to show a progress bar.

    Attributes:
        cells: the cells that are asked.
        store: the cells' examples as token ids.
        folder: the result folder.
        placed: the field of every row that names the mesh, "mesh"; {} without a mesh.

    Raises:
        ValueError: unknown names, or settings that do not fit together or do not fit the folder's cells.
    """

    def __init__(
        self,
        settings: EvaluationSettings,
        model: LoadedModel,
        out: pathlib.Path,
        *,
        cells: list[Cell] | None = None,
        force: bool = False,
        progress: bool = True,
    ) -> None:
        limit = settings.max_length or model.config.max_position_embeddings
        longest = max(settings.lengths, default=0)
        if settings.generated and longest > limit:
            raise ValueError(
                f"lengths must be at most {limit} tokens, what {model.name} was made for or max_length says, got {longest}; "
                f"max_length={longest} uses positions that it was not trained for, so take a method that re-numbers them "
                f"({', '.join(registry.extrapolating())})"
            )
        self._made_for = model.config  # NTK and PI divide by the length over what the model was made for, not over max_length
        if limit > model.config.max_position_embeddings:
            model = dataclasses.replace(model, config=dataclasses.replace(model.config, max_position_embeddings=limit))
        model = dataclasses.replace(model, kv_dtype=settings.kv_dtype)
        for choice in settings.choices if settings.kv_dtype else ():  # before anything runs
            method = choice.at(longest or limit, model.tokenizer, self._made_for, {}).method
            check_quantisable(layer_methods(method, model.config), settings.kv_dtype)
        self.settings, self.model, self._limit, self._begun = settings, model, limit, time.monotonic()
        mesh = mesh_text(mesh_axes(settings.mesh))
        self.placed = {"mesh": mesh} if mesh else {}
        self.progress = progress
        template = model.template if settings.template == "auto" else None
        ends = model.config.eos_token_ids
        self._reading = make_reading(settings, model.tokenizer_file, template, self._limit, ends)
        common = {
            "model": model.name,
            "dtype": model.dtypes,  # before the weights: an error about a folder names the first that differs
            "weights": model.weights,
            "template": template.identity if template else None,
            "system": settings.system,
            "template_variables": dict(settings.template_variables),
            "eos_token_ids": list(model.config.eos_token_ids),
            "truncation": settings.truncation,
            "max_length": self._limit,
            "max_new_tokens": settings.max_new_tokens,
            "seed": settings.seed,
            "decoding": "greedy",
        }
        self.folder = Folder(out, common, settings.to_yaml(), {**common, "settings": settings.as_dict()}, force)
        self._checked: set[Cell] = set()
        self._idle = 0.0  # seconds in which nothing had compiled, since a group ran
        self._settings: dict[tuple[str, int, str], Setting] = {}
        self._thresholds: dict[str, float] = {}  # of CHESS, before it is calibrated
        self.cells = make_cells(settings) if cells is None else cells
        if any(map(reads_code, self.cells)):
            check_library(self.folder.rows, f"{out}", library_origin())
        asked = any(needs_thresholds(one.name, one.knobs) for one in settings.choices)
        held_out = self._calibration.cells if asked and "chess_calibration" not in self.folder.results.notes else []
        self.store = CellStore(self._reading, [*held_out, *self.cells], settings.workers)
        self._plan = Plan(settings, model, self.store.__getitem__, self.cells, self._limit)

    def run(self) -> None:
        """Run every cell that the folder does not have.

        Raises:
            ValueError: the folder holds answers to other examples of a cell.
        """
        choices = self.settings.choices
        for cell in self.cells:  # files change; the generators do not, and their cells are checked before they are answered
            if from_file(cell.identity):
                self.check(cell)
        with CompileAhead() as ahead, CompileClock() as clock:
            self._compile_first(ahead)
            jobs = self._jobs(choices)
            waiting, coming = collections.deque[Group](), self._in_order(jobs, ahead)
            if names := without_file(self.settings):
                self._say(
                    f"left out, because no file of questions is given (--haystack {names[0]}=file:PATH): {', '.join(names)}"
                )
            if any(file.startswith("questions:") for file in self.settings.files) and (
                note := forms_asked(self.model.directory)
            ):
                self._say(note)
            self._say(f"{len(jobs)} cells to run, {len(choices) * len(self.cells) - len(jobs)} in {self.folder.path}")
            # The mean over all cells predicts the end better than the last cells, some of which have to be compiled.
            with progress_bar(total=len(jobs), unit="cell", smoothing=0, disable=not self.progress) as bar:
                while group := waiting.popleft() if waiting else next(coming, None):
                    self.folder.results.read()
                    left = [job for job in group.jobs if not self._finished(job)]  # others have made the rest
                    bar.update(len(group.jobs) - len(left))
                    parts = self._plan.alike(dataclasses.replace(group, jobs=left), self._answered)
                    if len(parts) != 1:  # none is left, or some need smaller batches than others
                        waiting.extendleft(reversed(parts))
                        continue
                    # Cells of a smaller group that are finished are counted when it is taken again.
                    waiting.extendleft(reversed(self._attempt(parts[0], ahead, clock, bar)))

    def _compile_first(self, ahead: CompileAhead) -> None:
        """Queue the programs of the first cell while prompts are made, and before CHESS is calibrated.

        Its thresholds are traced, so any will do. Methods that read alone come first, and before others are planned: they
        compile soon.
        """
        if not ahead.spare:
            return
        self._thresholds = {"tau_entropy": 0.0, "tau_varentropy": 0.0}
        first = [
            job for job in self._jobs(self.settings.choices) if job.cell == self.cells[0] and job.cell.length is not None
        ]
        if first:
            self.store.begin()
        plan = self._plan.before_prompts(first) if not any(map(self._answered, first)) else self._plan
        for alone in (True, False):
            for group in plan.groups([job for job in first if plan.alone(job) is alone]):
                for part in plan.alike(group, self._answered):
                    self._add(ahead, part, plan)
        self._thresholds = {}

    def _in_order(self, jobs: Sequence[Job], ahead: CompileAhead) -> Iterator[Group]:
        """List the first group of each cell, then the second, and so on, but first what has compiled.

        A cell is planned when it is reached, because its prompts may still be in the making. The groups of generated cells
        share their programs, which are compiled ahead.
        """
        cells: dict[Hashable, list[Job]] = {}
        for job in jobs:
            cells.setdefault((job.cell, job.question), []).append(job)
        coming, known = collections.deque(cells.values()), set[Hashable]()
        planned: list[tuple[tuple[int, int], Group, list[Hashable]]] = []  # in order, with the keys of programs
        first: list[Hashable] = []  # those of first groups
        while coming or planned:
            ready = next((one for one in planned if all(map(ahead.done, one[2]))), None)
            more = all(map(ahead.done, first)) or (ready is None and any(map(ahead.done, known)))
            if coming and (ready is None or ready[0][0] > 0) and (more or not planned):
                for at, group in enumerate(self._plan.groups(coming.popleft())):
                    generated = ahead.spare and group.jobs[0].cell.length is not None
                    parts = self._plan.alike(group, self._answered) if generated else ()
                    keys = [key for part in parts for key in self._add(ahead, part)]
                    first = first if at else keys
                    known.update(keys)
                    planned.append(((at, len(cells) - len(coming)), group, keys))
                planned.sort(key=lambda one: one[0])
            elif ready is None:
                time.sleep(_PAUSE)
                self._idle += _PAUSE
            else:
                planned.remove(ready)
                yield ready[1]

    def _finished(self, job: Job) -> bool:
        row = self.folder.find(job.identity)
        return row is not None and row["samples"] >= job.cell.samples

    def _answered(self, job: Job) -> int:
        row = self.folder.find(job.identity)
        return 0 if row is None else row["examples"]

    def _attempt(self, group: Group, ahead: CompileAhead, clock: CompileClock, bar: Any) -> list[Group]:
        """Run a group as `_run` does; if the device runs out of memory, return the groups to run instead.

        `kvjax.prefill_each` raises a ``MemoryError`` for caches that it knows not to fit.
        """
        try:
            self._run(group, ahead, clock, bar)
            bar.update(len(group.jobs))
            return []
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            lacks = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
            if not lacks or not (again := self._smaller(group)):
                raise
        gc.collect()  # the error's frames hold the caches that were too large, in cycles with the error
        return again

    def _smaller(self, group: Group) -> list[Group]:
        """Split a group that did not fit, or halve the rows of a single method; return [] if it had the fewest already."""
        jobs, job = group.jobs, group.jobs[0]
        did = f"out of memory: {job.cell.title}"
        if len(jobs) > 1:
            middle = len(jobs) // 2
            self._say(f"{did}: {len(jobs)} methods no longer prefill together, but {len(jobs) - middle} and {middle}")
            return [Group(jobs[:-middle], group.tokens), Group(jobs[-middle:], group.tokens)]
        if (rows := self._rows(group)) <= self.model.groups:
            return []
        fewer = group
        while self._rows(fewer) == rows:
            fewer = Group(jobs, fewer.tokens // 2)
        self._plan.limit(job.setting.method, fewer.tokens)
        self._say(f"{did} under {job.label}: {rows} rows at a time become {self._rows(fewer)}")
        return [fewer]

    def _rows(self, group: Group) -> int:
        """Return the most rows that are prefilled at once."""
        return max(batch.shape.rows for batch in self._plan.batches(group))

    def _run(self, group: Group, ahead: CompileAhead, clock: CompileClock, bar: Any) -> None:
        """Measure jobs that prefill a cell's contexts together.

        A row goes into the folder as soon as its method has answered, so that an interruption loses one method's answers.
        """
        jobs, cell = group.jobs, group.jobs[0].cell
        self.check(cell)
        name = jobs[0].label if len(jobs) == 1 else f"{len(jobs)} methods"

        def tell(what: str) -> None:
            bar.set_description(f"{name} {cell.title}: {what}", refresh=is_drawn())  # a log gets no line for it

        tell("compiling")
        idle, self._idle = self._idle, 0.0
        with Timer(clock) as waiting:
            for key in self._add(ahead, group):
                if error := ahead.wait(key):
                    self._say(f"{name}: compiled only now, because it failed ahead: {error!r:.200}")
        together = {"read_together": len(jobs)} if len(jobs) > 1 else {}
        encoded, batches, limit = self.store[cell], self._plan.batches(group), self.settings.max_new_tokens
        asked = encoded.after(group.answered), group.methods, jobs[0].question, batches, clock, limit, tell, group.parts
        for job, (row, predictions) in zip(jobs, answer_cell(self.model, *asked), strict=True):
            row["compile_seconds"] = round(row["compile_seconds"] + (waiting.run + waiting.compile + idle) / len(jobs), 2)
            if group.answered:
                row, predictions = self.folder.joined(encoded, job.identity, row, predictions)
            row = {**row, **job.identity, "budget": job.identity["knobs"].get("budget"), "note": job.setting.note}
            row |= self.placed | together | {"samples": cell.samples}
            self.folder.add(row, job.identity, predictions)
            self._say(
                f"{time.monotonic() - self._begun:7.1f} s  {job.label:24s} {cell.title:24s} "
                f"{row['value']:7.2f} {row['unit']:10s} {row['seconds']:6.1f} s, "
                f"compiling {row['compile_seconds']:.1f} s" + "  NO EFFECT: it read every token" * without_effect(row)
            )

    def _add(self, ahead: CompileAhead, group: Group, plan: Plan | None = None) -> list[Hashable]:
        """Add the programs of a group to the queue; return the key of each batch."""
        methods, keys = group.methods, []
        for batch in (plan or self._plan).batches(group):
            shape, config = batch.shape, with_room(self.model.config, batch.shape, methods)
            # The questions are asked one after the other: their number can change the program only through the room.
            sizes = shape.length, shape.rows, shape.room, shape.question_length
            keys.append((jax.tree.structure(methods), group.parts, *sizes, config))
            kind = {"kv_dtype": self.model.kv_dtype, "parts": group.parts}
            ahead.add(keys[-1], functools.partial(programs, self.model.params, config, methods, shape, **kind))
        return keys

    def check(self, cell: Cell) -> None:
        """Refuse a cell of which the folder holds answers to other examples, because they could not be compared."""
        if cell not in self._checked:
            check_answered(self.folder.rows, self.store[cell], self.folder.path)
            self._checked.add(cell)

    def _jobs(self, choices: Sequence[Choice]) -> list[Job]:
        """List the cells of every choice that the folder does not have."""
        jobs = []
        for choice in choices:
            for cell in self.cells:
                setting = self.setting(choice, cell)
                question = resolve_question(setting.method, self.settings.question)
                identity = {"method": choice.label, "knobs": knobs_of(setting.method), "question": question, **cell.identity}
                jobs.append(Job(choice.label, setting, question, cell, identity))
        return [job for job in jobs if not self._finished(job)]

    def setting(self, choice: Choice, cell: Cell) -> Setting:
        """Make the method of a choice at a cell's length."""
        length = cell.length
        if length is None:
            # A file's examples have lengths of their own; a budget that is a share is a share of their mean.
            length = int(np.mean([len(ids) for ids in self.store[cell].wholes]))
        calibrated = needs_thresholds(choice.name, choice.knobs)
        at = choice.label, length, str(self._thresholds) if calibrated else ""
        if at not in self._settings:  # SentenceKV reads every token of the vocabulary
            extra = (self._thresholds or self._chess()) if calibrated else {}
            self._settings[at] = choice.at(length, self.model.tokenizer, self._made_for, extra)
        return self._settings[at]

    @functools.cached_property
    def _calibration(self) -> Calibration:
        length = min(self.settings.lengths, default=2048)
        calibration = Calibration(expand(("trained",)), length, 16, 512, self.settings.seed)
        return calibration.within(self.model.config.max_position_embeddings)

    def _chess(self) -> dict[str, float]:
        """Calibrate CHESS' thresholds, once for a folder, on other prompts of the tasks that the shipped models know.

        The thresholds do not depend on the tasks of the run, so processes that share a folder run the same method.
        """
        if "chess_calibration" not in self.folder.results.notes:
            self._say(f"calibrating CHESS on {self._calibration.prompts} other prompts of {self._calibration.length} tokens")
        return chess_thresholds(self.model, self._calibration, self.folder.results, self.store.__getitem__)

    def _say(self, line: str) -> None:
        if self.progress:
            tqdm.write(line, file=sys.stderr)
