"""Evaluation prompts, tokenised in worker processes (imports no JAX, so that workers start fast)."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import multiprocessing
import pathlib
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from experiments.tasks import Sample, make_samples


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of an evaluation table.

    Attributes:
        task: task name.
        length: tokens of prompt and answer together.
        samples: how many.
        seed: seed of the set.
        haystack: kind, or None for the task's own.
    """

    task: str
    length: int
    samples: int
    seed: int
    haystack: str | None = None


@dataclasses.dataclass(frozen=True)
class Prompts:
    """A cell's samples and their token ids, in the same order."""

    cell: Cell
    samples: tuple[Sample, ...]
    tokens: tuple[tuple[int, ...], ...]


def make_prompts(tokenizer_file: pathlib.Path, cell: Cell) -> Prompts:
    """Makes and tokenises the held-out samples of one cell.

    Args:
        tokenizer_file: tokenizer.json of the model.
        cell: what to make.

    Returns:
        The prompts.

    Raises:
        ValueError: unknown task or haystack, or a length too short for the task.
    """
    tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    samples = make_samples(
        cell.task, length=cell.length, count=cell.samples, seed=cell.seed, count_tokens=count, haystack=cell.haystack
    )
    encoded = tokenizer.encode_batch([sample.prompt for sample in samples], add_special_tokens=False)
    return Prompts(cell, tuple(samples), tuple(tuple(e.ids) for e in encoded))


def all_prompts(tokenizer_file: pathlib.Path, cells: Sequence[Cell], workers: int) -> Iterator[Prompts]:
    """Yields the prompts of each cell in order, made ahead by worker processes.

    Args:
        tokenizer_file: tokenizer.json of the model.
        cells: the cells.
        workers: processes; 0 makes them in this one.

    Yields:
        One `Prompts` a cell.
    """
    if workers == 0:
        for cell in cells:
            yield make_prompts(tokenizer_file, cell)
        return
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        yield from pool.map(make_prompts, [tokenizer_file] * len(cells), cells)
