"""Parts of the methods, one at a time: `python -m experiments.ablations NAME[,NAME]|all --out docs/records/ablations`.

Names: votes, theta, extrapolate, sentences, chess, channels, hashing, causes. Each writes OUT/NAME.json after every cell and
goes on where it was interrupted; one Markdown file has the tables of all records in OUT. The question is part of the prompt.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import pathlib
import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from experiments.ablations import report as ablation_report
from experiments.ablations.agreement import measure_agreement, write_text
from experiments.ablations.plans import ABLATIONS, AGREEMENT, AGREEMENT_TASK, Arm, Lab, Table, check_tasks
from experiments.answering.cell import LoadedModel, batch_rows, load_model, measure
from experiments.answering.prompts import Cell, all_prompts
from experiments.records import record
from experiments.records.resumable import Results, knobs_of
from experiments.records.tables import table_file

MAX_TEXTS = 16  # prompts that Full writes on from, in one batch


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run; see `python -m experiments.ablations --help`.

    Raises:
        ValueError: an unknown ablation or task, or a number below 1.
    """

    names: tuple[str, ...]
    samples: int
    length: int = 8192
    seed: int = 0
    tasks: tuple[str, ...] | None = None
    trained_length: int = 16384
    calibration_prompts: int = 16
    new_tokens: int = 512
    batch_tokens: int = 131072
    workers: int = 4

    def __post_init__(self) -> None:
        for name in self.names:
            if name not in ABLATIONS:
                close = difflib.get_close_matches(name, ABLATIONS, n=1)
                hint = f" (did you mean {close[0]!r}?)" if close else ""
                raise ValueError(f"unknown ablation {name!r}{hint}; ablations: {', '.join(ABLATIONS)}")
        check_tasks(self.tasks)
        numbers = ("samples", "length", "trained_length", "calibration_prompts", "new_tokens", "batch_tokens")
        for field in numbers:
            if (value := vars(self)[field]) < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")


@dataclasses.dataclass(frozen=True)
class _Job:
    """One cell to run, and where it belongs."""

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
        """Equal for cells that are the same run, such as Full in several tables."""
        same = {name: value for name, value in self.identity.items() if name not in ("table", "arm")}
        return repr(same), self.arm.config


def run(settings: Settings, model: LoadedModel, out: pathlib.Path) -> None:
    """Runs the ablations that have cells left to run, one after another."""
    begun = time.monotonic()
    known: dict[tuple, dict[str, Any]] = {}
    for name in settings.names:
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
        results.note("tables", ablation_report.outline(tables))
        _run_tables(settings, model, results, tables, known, begun)
        write_report(out)


def write_report(out: pathlib.Path) -> None:
    """Writes the tables of all records in `out` to the file that `table_file` names."""
    records = [out / f"{name}.json" for name in ABLATIONS if (out / f"{name}.json").exists()]
    file = table_file(out)
    record.write_bytes(file, ablation_report.markdown(records, file.parent).encode())


def _jobs(settings: Settings, tables: Sequence[Table]) -> list[_Job]:
    """All cells of an ablation."""
    jobs = []
    for table in tables:
        for arm in table.arms:
            for task in arm.tasks:
                one = dataclasses.replace(arm, samples=min(arm.samples, MAX_TEXTS)) if task == AGREEMENT else arm
                identity = {
                    "table": table.title,
                    "arm": one.name,
                    "method": type(one.method).__name__.lower(),
                    "knobs": knobs_of(one.method),
                    "name": task,
                    "length": one.length,
                    "samples": one.samples,
                    "seed": settings.seed,
                }
                if task == AGREEMENT:
                    identity["new_tokens"] = settings.new_tokens
                rows = batch_rows(one.length, settings.batch_tokens, one.samples)
                jobs.append(_Job(table.title, one, task, rows, identity))
    return jobs


def _run_tables(
    settings: Settings,
    model: LoadedModel,
    results: Results,
    tables: Sequence[Table],
    known: dict[tuple, dict[str, Any]],
    begun: float,
) -> None:
    jobs = _jobs(settings, tables)
    todo = [job for job in jobs if results.find(job.identity) is None]
    fresh = [job for job in todo if job.run_key not in known]
    cells = list(dict.fromkeys(job.cell for job in fresh))
    coming, prompts = all_prompts(model.tokenizer_file, cells, settings.workers), {}
    with tqdm(total=len(jobs), unit="cell") as bar:
        bar.update(len(jobs) - len(todo))
        for job in todo:
            bar.set_description(f"{job.arm.name}: {job.task}")
            if job.run_key not in known:
                while job.cell not in prompts:
                    made = next(coming)
                    prompts[made.cell] = made
                armed = dataclasses.replace(model, config=job.arm.config)
                if job.task == AGREEMENT:
                    tokens = prompts[job.cell].tokens
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
    """What Full writes from the prompts of a cell; kept in the record."""
    about = f"{job.cell.task}, {job.cell.length} tokens, {job.cell.samples} samples, {new_tokens} written"
    if results.notes.get("texts", {}).get("about") != about:
        made = write_text(model, tokens, job.arm.length, new_tokens)
        results.note("texts", {"about": about, "ids": [" ".join(map(str, ids)) for ids in made]})
    return [[int(token) for token in ids.split()] for ids in results.notes["texts"]["ids"]]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Ablations of the five papers' methods.")
    parser.add_argument("names", help=f"comma-separated, or 'all': {', '.join(ABLATIONS)}")
    parser.add_argument("--model", default="builtin", help="Hugging Face directory, or 'builtin'")
    parser.add_argument("--samples", type=int, default=20, help="samples a cell")
    parser.add_argument("--length", type=int, default=8192, help="tokens")
    parser.add_argument("--tasks", help="comma-separated, instead of each ablation's own")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples")
    parser.add_argument("--trained-length", type=int, default=16384, help="extrapolation goes to 2, 4 and 8 times this")
    parser.add_argument("--calibration-prompts", type=int, default=16, help="prompts CHESS is calibrated on")
    parser.add_argument("--new-tokens", type=int, default=512, help="tokens written for calibration and agreement")
    parser.add_argument("--batch-tokens", type=int, default=131072, help="rows x length generated together")
    parser.add_argument("--workers", type=int, default=4, help="processes that make prompts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute dtype")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("docs/records/ablations"), help="directory of records"
    )
    arguments = parser.parse_args()
    settings = Settings(
        names=tuple(ABLATIONS) if arguments.names == "all" else tuple(arguments.names.split(",")),
        samples=arguments.samples,
        length=arguments.length,
        seed=arguments.seed,
        tasks=tuple(arguments.tasks.split(",")) if arguments.tasks else None,
        trained_length=arguments.trained_length,
        calibration_prompts=arguments.calibration_prompts,
        new_tokens=arguments.new_tokens,
        batch_tokens=arguments.batch_tokens,
        workers=arguments.workers,
    )
    run(settings, load_model(arguments.model, arguments.dtype), arguments.out)
    print(table_file(arguments.out).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
