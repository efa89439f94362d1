"""Generate and score one cell, with the method's accounting, for experiments whose prompts include the question.

Shapes are shared on purpose, because compiling costs more than running: all prompts are padded to the cell's length, the last
batch is filled up with copies of its first row, and all tasks decode up to the same number of tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.answering import LoadedModel, Shape, account, ask
from experiments.benchmarks import Encoded, score
from experiments.records import percent_interval
from kvjax.protocol.method import Method

DECODE_TOKENS = 128  # all tasks with shorter answers share a compiled program


@dataclasses.dataclass(frozen=True)
class Generated:
    """Continuations of some prompts.

    Attributes:
        ids: generated token ids of each prompt, a closing EOS included.
        accounting: means over the prompts, see `experiments.answering.account`.
        seconds: wall-clock seconds, compilation included.
    """

    ids: list[list[int]]
    accounting: dict[str, Any]
    seconds: float


def generate(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    method: Method | str,
    *,
    length: int,
    rows: int,
    new_tokens: int = DECODE_TOKENS,
    eos_token_ids: tuple[int, ...] | None = None,
    limits: Sequence[int] = (),
) -> Generated:
    """Generate greedy continuations.

    Args:
        model: the model.
        prompts: token ids, none longer than `length`.
        method: a kvjax method or its name.
        length: all prompts are padded to this number of tokens.
        rows: prompts that are generated together.
        new_tokens: most tokens that are generated for a prompt.
        eos_token_ids: tokens that end a row; None takes the model's, () takes none.
        limits: most tokens of each prompt's continuation, fewer than `new_tokens`; empty sets no limits.

    Returns:
        The continuations, with the method's mean accounting after the last step, and the seconds.
    """
    shape = Shape(length, rows, new_tokens)
    most = [[min(limit, new_tokens)] for limit in limits]
    asked = ask(model.params, model.config, prompts, method, shape, eos_token_ids=eos_token_ids, limits=most)
    return Generated([answers[0] for answers in asked.ids], account(asked.stats, rows), asked.run_seconds)


def measure(
    model: LoadedModel, encoded: Encoded, method: Method | str, *, rows: int, failures: int = 1
) -> dict[str, Any]:
    """Score one generated cell under a method; the question is part of the prompt.

    Args:
        model: the model.
        encoded: the cell's examples as token ids.
        method: a kvjax method or its name.
        rows: prompts that are generated together.
        failures: most wrong answers that the metric shows.

    Returns:
        A metric for `experiments.records.make_record`.

    Raises:
        ValueError: the task's answers are longer than this function generates.
    """
    cell, examples, ends = encoded.cell, encoded.examples, model.config.eos_token_ids
    limit = max(example.max_new_tokens for example in examples)
    if limit > DECODE_TOKENS:
        raise ValueError(
            f"{cell.task} takes answers of up to {limit} tokens, expected at most {DECODE_TOKENS} here: "
            "use kvjax eval"
        )
    limits = [example.max_new_tokens for example in examples]
    made = generate(model, encoded.wholes, method, length=cell.length, rows=rows, limits=limits)
    texts = [
        model.tokenizer.decode([token for token in ids[: example.max_new_tokens] if token not in ends])
        for ids, example in zip(made.ids, examples, strict=True)
    ]
    scores = [score(example, text) for text, example in zip(texts, examples, strict=True)]
    wrong = [
        {"answers": example.answers, "output": text}
        for text, example, value in zip(texts, examples, scores, strict=True)
        if value < 1.0
    ]
    return {
        "name": cell.task,
        "length": cell.length,
        "value": round(100 * float(np.mean(scores)), 2),
        "unit": "percent",
        "interval_95": percent_interval(scores),
        "scores": [round(float(value), 4) for value in scores],
        "samples": len(scores),
        "mean_prompt_tokens": round(float(np.mean([len(tokens) for tokens in encoded.wholes])), 1),
        "rows": rows,
        "seconds": round(made.seconds, 2),
        **made.accounting,
        "failures": wrong[:failures],
    }
