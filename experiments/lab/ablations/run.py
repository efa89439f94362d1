"""Runs the cells of an ablation that its record lacks."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import time
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax import Array
from tqdm import tqdm

import models
from experiments.answering import LoadedModel, Shape, batch_rows, programs
from experiments.benchmarks import Cell, CellStore, Reading
from experiments.evaluation import CompileAhead
from experiments.lab.ablations.arms import DISTANCES, PROSE, WRITTEN_TASK, Arm, Lab, Table
from experiments.lab.ablations.distance import measure_distance, write_text
from experiments.lab.ablations.measure import DECODE_TOKENS, measure
from experiments.lab.ablations.plans import ABLATIONS
from experiments.lab.ablations.report import outline
from experiments.lab.ablations.settings import AblationSettings
from experiments.lab.fidelity import FidelitySettings, Programs, Texts, make_texts, prose
from experiments.records import Results, knobs_of
from kvjax import registry
from models.hub.progress import progress_bar

LONGEST = 8192  # tokens of prompt and answer, for models whose window is longer


@dataclasses.dataclass(frozen=True)
class _Job:
    """A cell to run.

    Attributes:
        table: the cell's table.
        arm: the cell's row.
        task: the cell's column.
        identity: the fields that tell the cell from all others of its record.
    """

    table: Table
    arm: Arm
    task: str
    identity: dict[str, Any]

    @property
    def cell(self) -> Cell:
        return Cell(self.task, self.arm.length, self.arm.samples, self.identity["seed"])

    @property
    def run_key(self) -> str:
        """A key that is equal for cells that need the same run, such as Full in several tables."""
        return repr({name: value for name, value in self.identity.items() if name not in ("table", "arm", "setting")})


def run_ablation(
    settings: AblationSettings, name: str, model: LoadedModel, base: LoadedModel, out: pathlib.Path
) -> None:
    """Run the cells of an ablation that its record lacks.

    Args:
        settings: what to run.
        name: name of the ablation.
        model: the model that does the tasks.
        base: the model whose distance from Full is measured.
        out: the directory of the records.

    Raises:
        ValueError: a length beyond the model's window, or a record of other settings.
    """
    begun = time.monotonic()
    length = settings.length or min(model.config.max_position_embeddings, LONGEST)
    for one in (model, base):
        if length > (window := one.config.max_position_embeddings):
            raise ValueError(
                f"length must be at most {window} tokens, the window of {one.name}, got {length}; only the ablation "
                "extrapolate exceeds the window"
            )
    readings = {one.name: _reading(one, settings.template) for one in (model, base)}
    common = {
        "model": model.name, "weights": model.weights, "base": base.name, "base_weights": base.weights,
        "dtype": model.config.dtype, "seed": settings.seed, "length": length,
        "template": settings.template, "question": "in the prompt",
    }  # fmt: skip
    results = Results(out / f"{name}.json", f"ablation {name}", common)
    lab = Lab(
        model=model,
        base=base,
        results=results,
        length=length,
        samples=settings.samples,
        seed=settings.seed,
        tasks=settings.tasks,
        trained_length=settings.trained_length or base.config.max_position_embeddings,
        reading=readings[base.name],
        calibration_prompts=settings.calibration_prompts,
        new_tokens=settings.new_tokens,
    )
    tables = ABLATIONS[name](lab)
    results.note("tables", outline(tables))
    with Programs(base.params, base.config) as led, CompileAhead() as ahead:
        _run(settings, lab, tables, readings, _Followed(settings, lab, led), ahead, begun)


def _reading(model: LoadedModel, template: str) -> Reading:
    """Choose how a model's prompts become tokens."""
    found = models.ChatTemplate.from_directory(model.directory) if template == "auto" else None
    return Reading(model.tokenizer_file, found.around() if found else None)


def _jobs(settings: AblationSettings, lab: Lab, tables: Sequence[Table]) -> list[_Job]:
    """List all cells of an ablation."""
    jobs = []
    for table in tables:
        for arm in table.arms:
            for task in arm.tasks:
                far = task in DISTANCES
                identity = {
                    "table": table.title,
                    "arm": arm.name,
                    "setting": dict(arm.setting),
                    "method": type(arm.method).__name__.lower(),
                    "knobs": knobs_of(arm.method),
                    "name": task,
                    "model": (lab.base if far else arm.model).name,
                    "length": arm.length,
                    "samples": settings.texts if far else arm.samples,
                    "seed": settings.seed,
                }
                if far:
                    identity["new_tokens"] = settings.text_tokens if task == PROSE else settings.new_tokens
                jobs.append(_Job(table, arm, task, identity))
    return jobs


class _Followed:
    """The texts that methods decode, and Full's logits along the texts; each is made when it is first needed."""

    def __init__(self, settings: AblationSettings, lab: Lab, programs: Programs) -> None:
        self._settings, self._lab, self.programs = settings, lab, programs
        self._made: dict[str, Texts] = {}
        self._full: dict[str, Array] = {}

    def texts(self, name: str) -> Texts:
        if name not in self._made:
            self._made[name] = self._prose() if name == PROSE else self._written()
        return self._made[name]

    def full(self, name: str) -> Array:
        """Compute Full's logits along the texts, float32 [T, B, V]; drop the logits of other texts."""
        if name not in self._full:
            self._full = {name: self.programs.run(registry.make("full"), self.texts(name))[0]}
        return self._full[name]

    def _prose(self) -> Texts:
        settings = self._settings
        about = FidelitySettings(
            lengths=(self._lab.length,), samples=settings.texts, tokens=settings.text_tokens, seed=settings.seed
        )
        return prose(self._lab.base, about, self._lab.length)

    def _written(self) -> Texts:
        """Make texts that Full writes from prompts of a task, past the end of the answer; the record keeps the tokens."""
        lab, count, steps = self._lab, self._settings.texts, self._settings.new_tokens
        shorter = max(lab.length - steps, steps)
        cell = Cell(WRITTEN_TASK, shorter, count, lab.seed)
        prompts = CellStore(lab.reading, [cell], 0)[cell].wholes
        about = f"{lab.base.name}, {cell.title}, {count} samples, {steps} written"
        if lab.results.notes.get("texts", {}).get("about") != about:
            made = write_text(lab.base, prompts, shorter, steps)
            lab.results.note("texts", {"about": about, "ids": [" ".join(map(str, ids)) for ids in made]})
        written = [[int(token) for token in ids.split()] for ids in lab.results.notes["texts"]["ids"]]
        return make_texts(prompts, written, shorter, steps)


def _run(
    settings: AblationSettings,
    lab: Lab,
    tables: Sequence[Table],
    readings: dict[str, Reading],
    followed: _Followed,
    ahead: CompileAhead,
    begun: float,
) -> None:
    results, jobs = lab.results, _jobs(settings, lab, tables)
    todo = [job for job in jobs if results.find(job.identity) is None]
    for job in todo:  # compiled by other threads while the first cells run
        if job.task in DISTANCES:
            followed.programs.ahead(job.arm.method, followed.texts(job.task))
        elif ahead.spare:
            _compile(settings, job, ahead)
    stores = {
        model: CellStore(
            reading,
            [job.cell for job in todo if job.task not in DISTANCES and job.identity["model"] == model],
            settings.workers,
        )
        for model, reading in readings.items()
    }
    known: dict[str, dict[str, Any]] = {}
    with progress_bar(total=len(jobs), unit="cell") as bar:
        bar.update(len(jobs) - len(todo))
        for job in todo:
            bar.set_description(f"{job.arm.name}: {job.task}")
            bar.update()
            if _unsolved(results, job, settings.solved):
                continue
            if job.run_key not in known:
                known[job.run_key] = _measure(settings, job, stores, followed, ahead)
            metric = {**known[job.run_key], **job.identity}
            results.add(metric, {field: metric[field] for field in ("table", "arm", "name", "length", "model")})
            shown = f"{metric['value']:6.1f} %" if metric["unit"] == "percent" else f"{metric['value']:8.4f}"
            tqdm.write(
                f"{time.monotonic() - begun:7.1f} s  {job.arm.name:40s} {job.task:16s} {shown}  {metric['seconds']:6.1f} s"
            )


def _unsolved(results: Results, job: _Job, least: float | None) -> bool:
    """Tell whether Full scores too low on the task for other rows to say anything; Full's shortest length counts."""
    if job.task in DISTANCES or type(job.arm.method).__name__ == "Full":
        return False
    rows = [m for m in results.metrics if m["table"] == job.table.title and m["name"] == job.task]
    full = min((m for m in rows if m["method"] == "full"), key=lambda m: m["length"])
    return full["value"] < (job.table.solved if least is None else least)


def _measure(
    settings: AblationSettings, job: _Job, stores: dict[str, CellStore], followed: _Followed, ahead: CompileAhead
) -> dict[str, Any]:
    if job.task in DISTANCES:
        return measure_distance(
            followed.programs,
            followed.texts(job.task),
            job.arm.method,
            followed.full(job.task),
            name=job.task,
            length=job.arm.length,
        )
    ahead.wait(_compile(settings, job, ahead))
    model = dataclasses.replace(job.arm.model, config=_config(job.arm))
    rows = batch_rows(job.arm.length, settings.batch_tokens, job.arm.samples)
    return measure(model, stores[model.name][job.cell], job.arm.method, rows=rows)


def _config(arm: Arm) -> models.ModelConfig:
    """Return the description of an arm's model, with positions for the longest answer.

    Answers end at the task's limit, but a batch has room for more tokens, whose positions may lie behind the window.
    """
    config, longest = arm.model.config, arm.length + DECODE_TOKENS
    if longest > config.max_position_embeddings and not arm.method.extrapolates:
        return dataclasses.replace(config, max_position_embeddings=longest)
    return config


def _compile(settings: AblationSettings, job: _Job, ahead: CompileAhead) -> Hashable:
    """Add the programs of a cell to the queue; return their key."""
    arm, config = job.arm, _config(job.arm)
    shape = Shape(arm.length, batch_rows(arm.length, settings.batch_tokens, arm.samples), DECODE_TOKENS)
    key = (jax.tree.structure(arm.method), shape, config)
    ahead.add(key, functools.partial(programs, arm.model.params, config, arm.method, shape))
    return key
