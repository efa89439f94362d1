"""Perplexity of a text through the decode path: a prefilled context, then every token is fed and scored on its own.

The usual way scores a whole text in one pass, in which no method selects anything. Here a method reads `length` tokens as a
prompt and then decodes along the text, so that the tokens it leaves out are missed. (The prompt's logits score the first
token.)
"""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.answering import LoadedModel, account, batch_rows, follow, reads_all
from experiments.records import CompileClock, Timer, bootstrap_interval
from experiments.tasks import held_out_text
from kvjax.method import Method
from kvjax.plan import place_rows
from kvjax.stats import measure


def make_texts(tokenizer: Any, haystack: str, length: int, scored: int, count: int, seed: int) -> np.ndarray:
    """Passages of the part of a text that `experiments.tasks` holds out for evaluation.

    Args:
        tokenizer: the model's.
        haystack: "prose" or "file:PATH".
        length: tokens before the scored ones.
        scored: number of tokens that are scored.
        count: number of passages; they begin at random tokens.
        seed: seed of these beginnings.

    Returns:
        Token ids int32 [count, length + scored].

    Raises:
        ValueError: the text is too short, or the haystack is "noise", whose perplexity says nothing.
    """
    if haystack == "noise":
        raise ValueError("perplexity needs a text: haystack must be 'prose' or file:PATH, got 'noise'")
    ids = tokenizer.encode(held_out_text(haystack), add_special_tokens=False).ids
    wanted = length + scored
    if len(ids) < wanted:
        raise ValueError(
            f"the held-out part of {haystack} has {len(ids)} tokens, expected {wanted}: use shorter lengths or a longer text"
        )
    rng = random.Random(f"perplexity/{length}/{seed}")
    starts = [rng.randrange(len(ids) - wanted + 1) for _ in range(count)]
    return np.asarray([ids[start : start + wanted] for start in starts], np.int32)


def score_texts(
    model: LoadedModel,
    texts: np.ndarray,
    method: Method,
    *,
    length: int,
    batch_tokens: int,
    clock: CompileClock,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Perplexity of the tokens after the first `length`.

    Args:
        model: the model.
        texts: int32 [samples, length + scored].
        method: the method.
        length: tokens of the prompt.
        batch_tokens: rows x length that are read together.
        clock: counts compilation.

    Returns:
        A metric for `experiments.records.make_record` (per token; per word beside it), and a prediction for each passage.
    """
    rows = batch_rows(length, batch_tokens, len(texts), model.groups)
    log_likelihoods, agreed, stats = [], [], []
    with Timer(clock) as timer:
        for start in range(0, len(texts), rows):
            part = texts[start : start + rows]
            filled = np.concatenate([part, np.repeat(part[:1], rows - len(part), axis=0)])
            cache = kvjax.prefill(
                model.params,
                filled[:, :length],
                config=model.config,
                method=method,
                max_new_tokens=filled.shape[1] - length,
                kv_dtype=model.kv_dtype,
            )
            choices, likely, cache = follow(model.params, cache, *place_rows(cache.plan, jnp.asarray(filled[:, length:])))
            stats.append((len(part), jax.device_get(measure(cache))))
            del cache  # before the next one is made: memory need not hold both
            log_likelihoods.append(np.asarray(likely, np.float64)[: len(part)])
            agreed.append((np.asarray(choices) == filled[:, length:])[: len(part)])
    likely, right = np.concatenate(log_likelihoods), np.concatenate(agreed)
    words = [len(model.tokenizer.decode(row[length:].tolist()).split()) for row in texts]
    losses = -likely.mean(axis=1)
    predictions = [
        {
            "key": f"perplexity/{length}/{index}",
            "task": "perplexity",
            "nll_per_token": round(float(losses[index]), 6),
            "nll_per_step": [round(-float(x), 4) for x in likely[index]],
            "words": words[index],
            "next_token_accuracy": round(float(right[index].mean()), 6),
        }
        for index in range(len(texts))
    ]
    accounting = account(stats, rows)
    metric = {
        "name": "perplexity",
        "value": round(float(np.exp(losses.mean())), 4),
        "unit": "perplexity",
        "interval_95": [round(float(np.exp(end)), 4) for end in bootstrap_interval(losses)],
        "per_word": round(float(np.exp(-likely.sum() / max(sum(words), 1))), 4),
        "next_token_accuracy": round(100 * float(right.mean()), 2),
        "examples": len(texts),
        "mean_prompt_tokens": float(length),
        "mean_answer_tokens": float(texts.shape[1] - length),
        "truncated": 0,
        "by": {},
        **accounting,
        "no_effect": reads_all(accounting),
        "seconds": round(timer.run, 2),
        "compile_seconds": round(timer.compile, 2),
    }
    return metric, predictions
