"""Scores a model on the tasks: `python -m experiments.evaluate --model DIR|builtin --tasks all --out FILE.json`.

Free-running greedy generation on held-out samples, scored by each suite's own scorer.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from experiments import record
from experiments.answers import batch_rows, load_model, measure
from experiments.prompts import Cell, all_prompts
from experiments.results import knobs_of
from experiments.tasks import TASKS, get_task
from kvjax import registry
from kvjax.cli_generate import parse_knobs


def evaluate(
    model: str | pathlib.Path,
    *,
    tasks: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    seed: int = 0,
    haystack: str | None = None,
    method: str = "full",
    knobs: Mapping[str, Any] | None = None,
    batch_tokens: int = 131072,
    workers: int = 4,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Evaluates one model.

    Args:
        model: Hugging Face directory with tokenizer, or "builtin".
        tasks: task names.
        lengths: tokens of prompt and answer together.
        samples: samples a cell.
        seed: seed of the samples.
        haystack: kind for all tasks that take one; None uses each task's own.
        method: kvjax method by name.
        knobs: its hyper-parameters; None takes its defaults.
        batch_tokens: rows x length generated together.
        workers: processes that make prompts.
        dtype: compute dtype; None takes bfloat16 on a GPU and float32 elsewhere.

    Returns:
        The record, see `experiments.record`.

    Raises:
        ValueError: unknown task, haystack, method or knob, or a length too short for a task.
    """
    for name in tasks:
        get_task(name)
    loaded = load_model(model, dtype)
    made = registry.make(method, loaded.tokenizer, loaded.config.vocab_size, **(knobs or {}))
    cells = [
        Cell(name, length, samples, seed, haystack if get_task(name).haystack else None)
        for length in lengths
        for name in tasks
    ]
    metrics = []
    with tqdm(total=len(cells), unit="cell") as bar:
        for prompts in all_prompts(loaded.tokenizer_file, cells, workers):
            cell = prompts.cell
            metrics.append(
                measure(loaded, prompts, made, rows=batch_rows(cell.length, batch_tokens, samples), failures=3)
            )
            bar.set_postfix_str(f"{cell.task} {cell.length}: {metrics[-1]['value']}")
            bar.update()
    settings = {
        "model": loaded.name,
        "tasks": list(tasks),
        "lengths": list(lengths),
        "samples": samples,
        "seed": seed,
        "haystack": haystack,
        "method": method,
        "knobs": knobs_of(made),
        "dtype": loaded.config.dtype,
        "batch_tokens": batch_tokens,
        "decoding": "greedy",
    }
    return record.make_record("evaluate", settings, metrics)


def table(metrics: Sequence[dict[str, Any]]) -> str:
    """A text table task x length, in percent, with the sample counts in its last column."""
    lengths = list(dict.fromkeys(m["length"] for m in metrics))
    names = list(dict.fromkeys(m["name"] for m in metrics))
    value = {(m["name"], m["length"]): m for m in metrics}
    lines = [f"{'task':18s}" + "".join(f"{length:>9d}" for length in lengths) + f"{'samples':>10s}"]
    for name in names:
        cells = [value[name, length] for length in lengths]
        lines.append(
            f"{name:18s}"
            + "".join(f"{cell['value']:9.1f}" for cell in cells)
            + f"{'/'.join(dict.fromkeys(str(c['samples']) for c in cells)):>10s}"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Score a model on the retrieval tasks.")
    parser.add_argument("--model", default="builtin", help="Hugging Face directory, or 'builtin'")
    parser.add_argument("--tasks", default="all", help="comma-separated names, or 'all'")
    parser.add_argument("--lengths", default="1024,4096,8192,16384", help="comma-separated, tokens")
    parser.add_argument("--samples", type=int, default=100, help="samples a cell")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples")
    parser.add_argument("--haystack", help="'noise', 'prose' or file:PATH (default: each task's own)")
    parser.add_argument("--method", default="full", help="kvjax method")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KNOB=VALUE", help="a knob of the method; repeatable"
    )
    parser.add_argument("--batch-tokens", type=int, default=131072, help="rows x length generated together")
    parser.add_argument("--workers", type=int, default=4, help="processes that make prompts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute dtype")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON record to write")
    arguments = parser.parse_args()
    result = evaluate(
        arguments.model,
        tasks=tuple(TASKS) if arguments.tasks == "all" else arguments.tasks.split(","),
        lengths=[int(length) for length in arguments.lengths.split(",")],
        samples=arguments.samples,
        seed=arguments.seed,
        haystack=arguments.haystack,
        method=arguments.method,
        knobs=parse_knobs(arguments.method, arguments.set),
        batch_tokens=arguments.batch_tokens,
        workers=arguments.workers,
        dtype=arguments.dtype,
    )
    record.write_record(arguments.out, result)
    print(table(result["metrics"]))
    print(f"record: {arguments.out}")


if __name__ == "__main__":
    main()
