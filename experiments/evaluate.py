"""Scores a model on the tasks: `python -m experiments.evaluate --model DIR|builtin --tasks all --out FILE.json`.

Free-running greedy generation on held-out samples, scored by each suite's own scorer.
"""

from __future__ import annotations

import argparse
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

import kvjax
import models
from experiments import record
from experiments.prompts import Cell, Prompts, all_prompts
from experiments.tasks import TASKS, get_task, score

DECODE_TOKENS = 128  # the longest answer of any task; one compiled program for all tasks of a length


def batch_rows(length: int, batch_tokens: int, samples: int) -> int:
    """Rows generated together: as many as `batch_tokens` allow, at least one, at most the samples."""
    return max(1, min(samples, batch_tokens // length))


def generate_texts(
    params: Any, config: models.ModelConfig, tokenizer: Any, prompts: Prompts, rows: int, method: Any
) -> list[str]:
    """Greedy answers to all prompts of a cell.

    Args:
        params: model parameters.
        config: the model.
        tokenizer: its tokenizer.
        prompts: the cell.
        rows: prompts generated together.
        method: kvjax method (object or name).

    Returns:
        One text a prompt, cut at the task's generation length and before end-of-sequence.
    """
    limit = get_task(prompts.cell.task).max_new_tokens
    texts: list[str] = []
    for start in range(0, len(prompts.tokens), rows):
        part = prompts.tokens[start : start + rows]
        # Always the same shape: padded to the cell's length, the last batch filled with its first row.
        padded = np.zeros((rows, prompts.cell.length), np.int32)
        lengths = np.full(rows, len(part[0]), np.int32)
        padded[:, : len(part[0])] = part[0]
        for row, tokens in enumerate(part):
            padded[row] = 0
            padded[row, : len(tokens)] = tokens
            lengths[row] = len(tokens)
        cache = kvjax.prefill(
            params, padded, config=config, method=method, lengths=lengths, max_new_tokens=DECODE_TOKENS
        )
        out = kvjax.generate(params, cache, max_new_tokens=DECODE_TOKENS)
        ids, counts = jax.device_get((out.tokens, out.num_tokens))
        for row in range(len(part)):
            kept = [int(t) for t in ids[row, : min(int(counts[row]), limit)] if int(t) not in config.eos_token_ids]
            texts.append(tokenizer.decode(kept))
    return texts


def evaluate(
    model: pathlib.Path,
    *,
    tasks: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    seed: int = 0,
    haystack: str | None = None,
    method: str = "full",
    batch_tokens: int = 131072,
    workers: int = 4,
    dtype: str | None = None,
) -> dict[str, Any]:
    """Evaluates one model.

    Args:
        model: Hugging Face directory with tokenizer.
        tasks: task names.
        lengths: tokens of prompt and answer together.
        samples: samples a cell.
        seed: seed of the samples.
        haystack: kind for all tasks that take one; None uses each task's own.
        method: kvjax method by name.
        batch_tokens: rows x length generated together.
        workers: processes that make prompts.
        dtype: compute dtype; None takes bfloat16 on a GPU and float32 elsewhere.

    Returns:
        The record, see `experiments.record`.

    Raises:
        ValueError: unknown task, haystack or method, or a length too short for a task.
    """
    for name in tasks:
        get_task(name)
    if dtype is None:
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    params, config = models.from_pretrained(model, dtype=dtype)
    tokenizer = models.load_tokenizer(model, config)
    cells = [
        Cell(name, length, samples, seed, haystack if get_task(name).haystack else None)
        for length in lengths
        for name in tasks
    ]
    metrics = []
    with tqdm(total=len(cells), unit="cell") as bar:
        for prompts in all_prompts(model / "tokenizer.json", cells, workers):
            cell = prompts.cell
            begun = time.monotonic()
            rows = batch_rows(cell.length, batch_tokens, samples)
            texts = generate_texts(params, config, tokenizer, prompts, rows, method)
            scores = [score(cell.task, text, s.answers) for text, s in zip(texts, prompts.samples, strict=True)]
            wrong = [
                {"answers": s.answers, "output": text}
                for text, s, value in zip(texts, prompts.samples, scores, strict=True)
                if value < 1.0
            ]
            metrics.append(
                {
                    "name": cell.task,
                    "length": cell.length,
                    "value": round(100 * float(np.mean(scores)), 2),
                    "unit": "percent",
                    "samples": len(scores),
                    "mean_prompt_tokens": round(float(np.mean([len(t) for t in prompts.tokens])), 1),
                    "seconds": round(time.monotonic() - begun, 2),
                    "failures": wrong[:3],
                }
            )
            bar.set_postfix_str(f"{cell.task} {cell.length}: {metrics[-1]['value']}")
            bar.update()
    settings = {
        "model": model.name,
        "tasks": list(tasks),
        "lengths": list(lengths),
        "samples": samples,
        "seed": seed,
        "haystack": haystack,
        "method": method,
        "dtype": dtype,
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
    parser.add_argument("--batch-tokens", type=int, default=131072, help="rows x length generated together")
    parser.add_argument("--workers", type=int, default=4, help="processes that make prompts")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute dtype")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON record to write")
    arguments = parser.parse_args()
    model = models.builtin_directory() if arguments.model == "builtin" else pathlib.Path(arguments.model)
    result = evaluate(
        model,
        tasks=tuple(TASKS) if arguments.tasks == "all" else arguments.tasks.split(","),
        lengths=[int(length) for length in arguments.lengths.split(",")],
        samples=arguments.samples,
        seed=arguments.seed,
        haystack=arguments.haystack,
        method=arguments.method,
        batch_tokens=arguments.batch_tokens,
        workers=arguments.workers,
        dtype=arguments.dtype,
    )
    record.write_record(arguments.out, result)
    print(table(result["metrics"]))
    print(f"record: {arguments.out}")


if __name__ == "__main__":
    main()
