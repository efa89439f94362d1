"""All methods on all tasks: `python -m experiments.compare --methods all --tasks all --lengths 8192 --out FILE.json`.

Full always comes first. The question is part of the prompt that every method compresses. Papers' methods run at their papers'
budgets, baselines at an eighth of the context (`experiments.method_settings`). The record is written after every cell and
the table beside it after every method; a cell that the record already has is skipped, so the same command goes on where it
was interrupted, and other methods, tasks and lengths join the same file.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from experiments import compare_report, record
from experiments.answers import CompileAhead, LoadedModel, Program, batch_rows, load_model, measure
from experiments.method_settings import (
    METHODS,
    Calibration,
    Setting,
    chess_thresholds,
    paper_method,
    read_settings,
)
from experiments.prompts import Cell, Prompts, all_prompts
from experiments.results import Results, knobs_of
from experiments.tasks import expand, get_task
from kvjax.cli_generate import parse_knobs


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to compare; see `python -m experiments.compare --help`.

    Raises:
        ValueError: an unknown task or method, or a number below 1.
    """

    methods: tuple[str, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    samples: int
    seed: int = 0
    haystack: str | None = None
    batch_tokens: int = 131072
    workers: int = 4
    compile_threads: int = 0
    calibration_prompts: int = 16
    calibration_new_tokens: int = 512

    def __post_init__(self) -> None:
        for task in self.tasks:
            get_task(task)
        numbers = ("samples", "batch_tokens", "calibration_prompts", "calibration_new_tokens")
        for name, value in [*((name, vars(self)[name]) for name in numbers), *(("lengths", n) for n in self.lengths)]:
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        read_settings([f"{name}." for name in self.methods], lambda name, texts: {})

    def cell(self, task: str, length: int) -> Cell:
        """The cell of a task and length."""
        return Cell(task, length, self.samples, self.seed, self.haystack if get_task(task).haystack else None)


class PromptStore:
    """Prompts made ahead by worker processes, kept for the methods that follow.

    Args:
        model: gives the tokenizer.
        cells: in the order they will first be asked for.
        workers: processes; 0 makes them in this one.
    """

    def __init__(self, model: LoadedModel, cells: Sequence[Cell], workers: int) -> None:
        self._coming: Iterator[Prompts] = all_prompts(model.tokenizer_file, cells, workers)
        self._made: dict[Cell, Prompts] = {}

    def __getitem__(self, cell: Cell) -> Prompts:
        while cell not in self._made:
            prompts = next(self._coming)
            self._made[prompts.cell] = prompts
        return self._made[cell]


def make_settings(
    plan: Plan, model: LoadedModel, results: Results, knobs: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, int], Setting]:
    """Every method at every length, Full first; CHESS calibrated at the shortest length unless its knobs say otherwise."""
    calibration = Calibration(
        plan.tasks, min(plan.lengths), plan.calibration_prompts, plan.calibration_new_tokens, plan.seed
    )
    made = {}
    for name in dict.fromkeys(["full", *(name.lower() for name in plan.methods)]):
        given = dict(knobs.get(name, {}))
        if name == "chess" and given.get("trigger", "and") in ("and", "or"):
            given = {**chess_thresholds(model, calibration, results), **given}
        for length in plan.lengths:
            made[name, length] = paper_method(name, length, tokenizer=model.tokenizer, config=model.config, given=given)
    return made


def compare(plan: Plan, model: LoadedModel, results: Results, knobs: Mapping[str, Mapping[str, Any]]) -> None:
    """Runs what the results do not have yet.

    Args:
        plan: what to compare.
        model: the model.
        results: read, and written after every cell.
        knobs: by method, before the paper's.
    """
    settings = make_settings(plan, model, results, knobs)
    todo = []
    for (name, length), setting in settings.items():
        for task in plan.tasks:
            identity = {
                "method": name,
                "knobs": knobs_of(setting.method),
                "name": task,
                "length": length,
                "samples": plan.samples,
            }
            if results.find(identity) is None:
                todo.append((setting, plan.cell(task, length), identity))
    rows = {length: batch_rows(length, plan.batch_tokens, plan.samples) for length in plan.lengths}
    programs = [Program(s.method, model.config, cell.length, rows[cell.length]) for s, cell, _ in todo]
    prompts = PromptStore(model, list(dict.fromkeys(cell for _, cell, _ in todo)), plan.workers)
    begun = time.monotonic()
    tqdm.write(f"{len(todo)} cells to run, {len(settings) * len(plan.tasks) - len(todo)} in the record")
    jobs = [(program.key, functools.partial(program.compile, model)) for program in programs]
    with CompileAhead(jobs, plan.compile_threads) as ahead, tqdm(total=len(todo), unit="cell") as bar:
        for (setting, cell, identity), program in zip(todo, programs, strict=True):
            bar.set_description(f"{setting.name} {cell.length}")
            ready = prompts[cell]
            ahead.wait(program.key)
            metric = {
                **measure(model, ready, setting.method, rows=program.rows),
                **identity,
                "note": setting.note,
            }
            results.add(metric, {name: metric[name] for name in ("method", "name", "length")})
            tqdm.write(
                f"{time.monotonic() - begun:7.1f} s  {setting.name:13s} {cell.task:16s} {cell.length:6d}  "
                f"{metric['value']:6.1f} %  {metric['seconds']:6.1f} s"
            )
            bar.update()
            if cell.task == plan.tasks[-1]:
                write_report(results)


def write_report(results: Results) -> str:
    """Writes the tables beside the record; returns them."""
    text = compare_report.markdown(results)
    record.write_bytes(results.path.with_suffix(".md"), text.encode())
    return text


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Compare KV-cache methods on the retrieval tasks.")
    parser.add_argument("--model", default="builtin", help="Hugging Face directory, or 'builtin'")
    parser.add_argument("--methods", default="all", help="comma-separated names, or 'all'; Full is always run first")
    parser.add_argument("--tasks", default="all", help="comma-separated names or groups; 'all' is the group 'trained'")
    parser.add_argument("--lengths", default="8192,16384", help="comma-separated, tokens")
    parser.add_argument("--samples", type=int, default=25, help="samples a cell")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples")
    parser.add_argument("--haystack", help="'noise', 'prose' or file:PATH (default: each task's own)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="METHOD.KNOB=VALUE", help="a knob of a method; repeatable"
    )
    parser.add_argument("--batch-tokens", type=int, default=131072, help="rows x length generated together")
    parser.add_argument("--workers", type=int, default=4, help="processes that make prompts")
    parser.add_argument("--compile-threads", type=int, default=0, help="programs compiled ahead, in threads")
    parser.add_argument("--calibration-prompts", type=int, default=16, help="prompts CHESS is calibrated on")
    parser.add_argument("--calibration-new-tokens", type=int, default=512, help="tokens generated for each of them")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute dtype")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON record; the table goes beside it")
    arguments = parser.parse_args()
    plan = Plan(
        methods=METHODS if arguments.methods == "all" else tuple(arguments.methods.split(",")),
        tasks=expand(["trained"] if arguments.tasks == "all" else arguments.tasks.split(",")),
        lengths=tuple(int(length) for length in arguments.lengths.split(",")),
        samples=arguments.samples,
        seed=arguments.seed,
        haystack=arguments.haystack,
        batch_tokens=arguments.batch_tokens,
        workers=arguments.workers,
        compile_threads=arguments.compile_threads,
        calibration_prompts=arguments.calibration_prompts,
        calibration_new_tokens=arguments.calibration_new_tokens,
    )
    knobs = read_settings(arguments.set, parse_knobs)
    model = load_model(arguments.model, arguments.dtype)
    results = open_results(arguments.out, "compare", plan, model)
    compare(plan, model, results, knobs)
    print(write_report(results))
    print(f"record: {arguments.out}")


def open_results(path: pathlib.Path, experiment: str, plan: Any, model: LoadedModel) -> Results:
    """The record of an experiment, with what all its cells have in common."""
    settings = {
        "model": model.name,
        "dtype": model.config.dtype,
        "seed": plan.seed,
        "haystack": plan.haystack,
        "question": "in the prompt",
        "decoding": "greedy",
    }
    return Results(path, experiment, settings)


if __name__ == "__main__":
    main()
