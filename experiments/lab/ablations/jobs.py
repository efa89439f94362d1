"""Runs ablations one after the other, or several at a time in processes that share the device."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import pathlib

import jax

from experiments.answering import LoadedModel, load_model
from experiments.benchmarks import end_with_parent, held_interrupts
from experiments.cli import CompiledPrograms, Operations
from experiments.lab.ablations.cluster_drift import Course, run_drift
from experiments.lab.ablations.plans import DRIFT
from experiments.lab.ablations.report import ablation_tables, records_in
from experiments.lab.ablations.run import run_ablation
from experiments.lab.ablations.settings import AblationSettings
from experiments.records import table_file, write_bytes
from pallas_kernels.dispatch import get_default_implementation


def run_all(settings: AblationSettings, out: pathlib.Path) -> None:
    """Run the cells that the records in ``out`` lack, and write the page of tables after every ablation.

    Raises:
        ValueError: a length beyond the model's window, or a record of other settings.
    """
    if settings.processes > 1 and len(settings.ablations) > 1:
        _run_beside(settings, out)
    else:
        model, base = _load(settings)
        for name in settings.ablations:
            _run(settings, name, model, base, out)
            write_report(out)
    write_report(out)


def write_report(out: pathlib.Path) -> None:
    """Write the tables of all records in ``out`` to the file that `experiments.records.table_file` names."""
    file = table_file(out)
    write_bytes(file, ablation_tables(records_in(out), file.parent).encode())


def _run_beside(settings: AblationSettings, out: pathlib.Path) -> None:
    """Run every ablation in a process of its own. This process never touches the device."""
    # Processes that take all memory at their start cannot share a device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        settings.processes, mp_context=spawn, max_tasks_per_child=1, initializer=end_with_parent
    ) as pool:
        kept = CompiledPrograms(cache=jax.config.jax_enable_compilation_cache)
        how = Operations(get_default_implementation())
        with held_interrupts():
            jobs = [pool.submit(_run_alone, settings, name, out, kept, how) for name in settings.ablations]
        for job in concurrent.futures.as_completed(jobs):
            job.result()
            write_report(out)


def _run_alone(
    settings: AblationSettings, name: str, out: pathlib.Path, kept: CompiledPrograms, how: Operations
) -> None:
    kept.switch_on()  # as this process's parent did
    with how.in_force():
        _run(settings, name, *_load(settings), out)


def _load(settings: AblationSettings) -> tuple[LoadedModel, LoadedModel]:
    """Load the model that does the tasks, and the base."""
    model = settings.load()
    if settings.base in (None, settings.model):
        return model, model
    return model, load_model(settings.base, settings.dtype, offline=settings.offline, weight_dtype=settings.weight_dtype)


def _run(settings: AblationSettings, name: str, model: LoadedModel, base: LoadedModel, out: pathlib.Path) -> None:
    if name != DRIFT:
        run_ablation(settings, name, model, base, out)
    elif not (record := out / f"{DRIFT}.json").exists():
        run_drift(base, Course.within(base.config.max_position_embeddings, settings.seed), record)
