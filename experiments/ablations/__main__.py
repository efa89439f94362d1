"""Parts of the methods, one at a time: `python -m experiments.ablations NAME[,NAME]|all --out docs/records/ablations`.

Each ablation writes OUT/NAME.json after every cell, and goes on from it after an interruption. A Markdown file has the
papers' claims and the tables of all records in OUT. The question is part of the prompt, in the model's chat template. A task
that Full does not solve is left out. All of it for the tuned twin of SmolLM2, with distances on its base:

    python -m experiments.ablations all --model smollm2-retrieval --base smollm2 --processes 6 --out docs/records/ablations
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import os
import pathlib
from collections.abc import Sequence

from experiments.ablations.plans import DRIFT
from experiments.ablations.report import ablation_tables, records_in
from experiments.ablations.run import run_ablation
from experiments.ablations.settings import AblationSettings
from experiments.answering import LoadedModel, load_model
from experiments.cli import run
from experiments.drift.run import run_drift
from experiments.drift.settings import DriftSettings
from experiments.records import table_file, write_bytes


@dataclasses.dataclass(frozen=True)
class AblationCommand:
    """Where `experiments.ablations` writes.

    Attributes:
        out: directory of records
    """

    out: pathlib.Path = pathlib.Path("docs/records/ablations")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    about = "Ablations of the five papers' methods."
    return run(_ablate, AblationSettings, AblationCommand, prog="kvjax ablations", about=about, argv=argv)


def _ablate(settings: AblationSettings, command: AblationCommand) -> None:
    if settings.processes == 1 or len(settings.ablations) == 1:
        model = load_model(settings.model, settings.dtype)
        base = model if settings.base in (None, settings.model) else load_model(settings.base, settings.dtype)
        for name in settings.ablations:
            _run(settings, name, model, base, command.out)
            write_report(command.out)
    else:
        _run_beside(settings, command.out)
        write_report(command.out)
    print(table_file(command.out).read_text(encoding="utf-8"))


def _run_beside(settings: AblationSettings, out: pathlib.Path) -> None:
    """Runs ablations in processes of their own. This process never touches the device."""
    # Processes that take all memory at their start cannot share a device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(settings.processes, mp_context=spawn, max_tasks_per_child=1) as pool:
        jobs = [pool.submit(_run_alone, settings, name, out) for name in settings.ablations]
        for job in concurrent.futures.as_completed(jobs):
            job.result()
            write_report(out)


def _run_alone(settings: AblationSettings, name: str, out: pathlib.Path) -> None:
    model = load_model(settings.model, settings.dtype)
    base = model if settings.base in (None, settings.model) else load_model(settings.base, settings.dtype)
    _run(settings, name, model, base, out)


def _run(settings: AblationSettings, name: str, model: LoadedModel, base: LoadedModel, out: pathlib.Path) -> None:
    if name != DRIFT:
        run_ablation(settings, name, model, base, out)
    elif not (out / f"{DRIFT}.json").exists():
        run_drift(base, DriftSettings.within(base.config.max_position_embeddings), out / DRIFT)


def write_report(out: pathlib.Path) -> None:
    """Write the tables of all records in ``out`` to the file that `experiments.records.table_file` names."""
    file = table_file(out)
    write_bytes(file, ablation_tables(records_in(out), file.parent).encode())


if __name__ == "__main__":
    raise SystemExit(main())
