"""Runs the cells of the ablations that their records lack, and writes the tables."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from experiments.ablations.agreement import measure_agreement, write_text
from experiments.ablations.arms import AGREEMENT, AGREEMENT_TASK, Arm, Lab, Table
from experiments.ablations.plans import ABLATIONS
from experiments.ablations.report import ablation_tables, outline
from experiments.ablations.settings import AblationSettings
from experiments.answering import LoadedModel, batch_rows, measure
from experiments.records import Results, knobs_of, table_file, write_bytes
from experiments.suites import Cell, CellStore, Reading

MAX_TEXTS = 16  # prompts that Full writes on from, in a single batch


@dataclasses.dataclass(frozen=True)
class _Job:
    """A cell to run.

    Attributes:
        table: the title of the cell's table.
        arm: the cell's row.
        task: the cell's column.
        rows: prompts that are generated together.
        identity: the fields that tell the cell from all others of its record.
    """

    table: str
    arm: Arm
    task: str
    rows: int
    identity: dict[str, Any]

    @property
    def cell(self) -> Cell:
        task = AGREEMENT_TASK if self.task == AGREEMENT else self.task
        return Cell(task, self.arm.length, self.arm.samples, self.identity["seed"])

    @property
    def run_key(self) -> tuple:
        """A key that is equal for cells that need the same run, such as Full in several tables."""
        same = {name: value for name, value in self.identity.items() if name not in ("table", "arm")}
        return repr(same), self.arm.config


def run_ablations(settings: AblationSettings, model: LoadedModel, out: pathlib.Path) -> None:
    """Run the cells that the ablations' records lack, an ablation after the other.

    Args:
        settings: what to run.
        model: the model.
        out: the directory of the records.
    """
    begun = time.monotonic()
    known: dict[tuple, dict[str, Any]] = {}
    for name in settings.ablations:
        common = {"model": model.name, "dtype": model.config.dtype, "seed": settings.seed, "length": settings.length}
        results = Results(out / f"{name}.json", f"ablation {name}", {**common, "question": "in the prompt"})
        lab = Lab(
            model=model,
            results=results,
            length=settings.length,
            samples=settings.samples,
            seed=settings.seed,
            tasks=settings.tasks,
            trained_length=settings.trained_length,
            calibration_prompts=settings.calibration_prompts,
            new_tokens=settings.new_tokens,
        )
        tqdm.write(f"{time.monotonic() - begun:7.1f} s  {name}")
        tables = ABLATIONS[name](lab)
        results.note("tables", outline(tables))
        _run_tables(settings, model, results, tables, known, begun)
        write_report(out)


def write_report(out: pathlib.Path) -> None:
    """Write the tables of all records in ``out`` to the file that `experiments.records.table_file` names."""
    records = [out / f"{name}.json" for name in ABLATIONS if (out / f"{name}.json").exists()]
    file = table_file(out)
    write_bytes(file, ablation_tables(records, file.parent).encode())


def _jobs(settings: AblationSettings, tables: Sequence[Table]) -> list[_Job]:
    """All cells of an ablation."""
    jobs = []
    for table in tables:
        for arm in table.arms:
            for task in arm.tasks:
                samples = min(arm.samples, MAX_TEXTS) if task == AGREEMENT else arm.samples
                identity = {
                    "table": table.title,
                    "arm": arm.name,
                    "method": type(arm.method).__name__.lower(),
                    "knobs": knobs_of(arm.method),
                    "name": task,
                    "length": arm.length,
                    "samples": samples,
                    "seed": settings.seed,
                }
                if task == AGREEMENT:
                    identity["new_tokens"] = settings.new_tokens
                rows = batch_rows(arm.length, settings.batch_tokens, samples)
                jobs.append(_Job(table.title, dataclasses.replace(arm, samples=samples), task, rows, identity))
    return jobs


def _run_tables(
    settings: AblationSettings,
    model: LoadedModel,
    results: Results,
    tables: Sequence[Table],
    known: dict[tuple, dict[str, Any]],
    begun: float,
) -> None:
    jobs = _jobs(settings, tables)
    todo = [job for job in jobs if results.find(job.identity) is None]
    fresh = [job for job in todo if job.run_key not in known]
    prompts = CellStore(Reading(model.tokenizer_file), [job.cell for job in fresh], settings.workers)
    with tqdm(total=len(jobs), unit="cell") as bar:
        bar.update(len(jobs) - len(todo))
        for job in todo:
            bar.set_description(f"{job.arm.name}: {job.task}")
            if job.run_key not in known:
                armed = dataclasses.replace(model, config=job.arm.config)
                if job.task == AGREEMENT:
                    tokens = prompts[job.cell].wholes
                    texts = _texts(results, armed, job, tokens, settings.new_tokens)
                    metric = measure_agreement(armed, tokens, texts, job.arm.method, length=job.arm.length)
                else:
                    metric = measure(armed, prompts[job.cell], job.arm.method, rows=job.rows)
                known[job.run_key] = metric
            metric = {**known[job.run_key], **job.identity}
            results.add(metric, {field: metric[field] for field in ("table", "arm", "name", "length")})
            tqdm.write(
                f"{time.monotonic() - begun:7.1f} s  {job.arm.name:40s} {job.task:16s} {metric['value']:6.1f} %  "
                f"{metric['seconds']:6.1f} s"
            )
            bar.update()


def _texts(
    results: Results, model: LoadedModel, job: _Job, tokens: Sequence[Sequence[int]], new_tokens: int
) -> list[list[int]]:
    """The texts that Full writes from the prompts of a cell; the record keeps them."""
    about = f"{job.cell.task}, {job.cell.length} tokens, {job.cell.samples} samples, {new_tokens} written"
    if results.notes.get("texts", {}).get("about") != about:
        made = write_text(model, tokens, job.arm.length, new_tokens)
        results.note("texts", {"about": about, "ids": [" ".join(map(str, ids)) for ids in made]})
    return [[int(token) for token in ids.split()] for ids in results.notes["texts"]["ids"]]
