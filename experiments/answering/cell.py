"""What a model answers under a method, scored and accounted for: the one way the experiments generate.

Shapes are shared on purpose, because compilation costs more than running: every prompt is padded to its cell's length, the
last batch is filled up with copies of its first row, and every task decodes up to the same number of tokens.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import models
from experiments.answering.ask import Shape, account, ask
from experiments.answering.prompts import Prompts
from experiments.records import bootstrap_interval
from experiments.tasks import get_task, score
from kvjax.method import Method

DECODE_TOKENS = 128  # the longest answer of any task; one compiled program for all tasks of a length


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model, ready to answer."""

    name: str
    params: Any
    config: models.ModelConfig
    tokenizer: Any
    tokenizer_file: pathlib.Path


def load_model(model: str | pathlib.Path, dtype: str | None = None) -> LoadedModel:
    """Loads a Hugging Face directory, or the model that ships.

    Args:
        model: the directory, or "builtin".
        dtype: compute dtype; None takes bfloat16 on a GPU and float32 elsewhere.
    """
    directory = models.builtin_directory() if str(model) == "builtin" else models.checkpoint_directory(model)
    if dtype is None:
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    params, config = models.from_pretrained(directory, dtype=dtype)
    tokenizer = models.load_tokenizer(directory, config)
    return LoadedModel(directory.name, params, config, tokenizer, directory / "tokenizer.json")


@dataclasses.dataclass(frozen=True)
class Generated:
    """Token ids generated for each prompt, a closing EOS included, and what the method took."""

    ids: list[list[int]]
    accounting: dict[str, Any]
    seconds: float  # wall clock, compilation included where there was any


def batch_rows(length: int, batch_tokens: int, samples: int) -> int:
    """Rows generated together: as many as `batch_tokens` allow (at least one), batches as equal as possible."""
    most = max(1, batch_tokens // length)
    batches = -(-samples // most)
    return -(-samples // batches)


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    method: Method | str,
    *,
    length: int,
    rows: int,
    new_tokens: int = DECODE_TOKENS,
    eos_token_ids: tuple[int, ...] | None = None,
) -> Generated:
    """Greedy continuations.

    Args:
        model: the model.
        prompts: token ids, none longer than `length`.
        method: kvjax method or its name.
        length: tokens every prompt is padded to.
        rows: prompts generated together.
        new_tokens: most tokens generated.
        eos_token_ids: what ends a row; None takes the model's, () nothing.

    Returns:
        Ids, means over the prompts of the method's accounting at the end, and seconds.
    """
    shape = Shape(length, rows, new_tokens)
    asked = ask(model.params, model.config, prompts, method, shape, eos_token_ids=eos_token_ids)
    return Generated([answers[0] for answers in asked.ids], account(asked.stats, rows), asked.run_seconds)


def interval(scores: Sequence[float], groups: Sequence[str] = ()) -> list[float]:
    """95 % bootstrap interval of the mean score in percent, see `experiments.records.bootstrap`."""
    return [round(100 * end, 2) for end in bootstrap_interval(scores, groups)]


def measure(
    model: LoadedModel, prompts: Prompts, method: Method | str, *, rows: int, failures: int = 1
) -> dict[str, Any]:
    """One cell: the task's score under the method, and what the method took.

    Args:
        model: the model.
        prompts: the cell; the question is part of the prompt.
        method: kvjax method or its name.
        rows: prompts generated together.
        failures: wrong answers to show.

    Returns:
        A metric for `experiments.records.record`.
    """
    cell = prompts.cell
    limit = get_task(cell.task).max_new_tokens
    if limit > DECODE_TOKENS:
        raise ValueError(
            f"{cell.task} takes answers of up to {limit} tokens, expected at most {DECODE_TOKENS} here: "
            "use python -m kvjax eval"
        )
    made = generate(model, prompts.tokens, method, length=cell.length, rows=rows)
    ends = model.config.eos_token_ids
    texts = [model.tokenizer.decode([token for token in ids[:limit] if token not in ends]) for ids in made.ids]
    scores = [score(cell.task, text, sample.answers) for text, sample in zip(texts, prompts.samples, strict=True)]
    wrong = [
        {"answers": sample.answers, "output": text}
        for text, sample, value in zip(texts, prompts.samples, scores, strict=True)
        if value < 1.0
    ]
    return {
        "name": cell.task,
        "length": cell.length,
        "value": round(100 * float(np.mean(scores)), 2),
        "unit": "percent",
        "interval_95": interval(scores),
        "samples": len(scores),
        "mean_prompt_tokens": round(float(np.mean([len(tokens) for tokens in prompts.tokens])), 1),
        "rows": rows,
        "seconds": round(made.seconds, 2),
        **made.accounting,
        "failures": wrong[:failures],
    }
