"""How often a method would choose the same next token as Full, along a long text that Full wrote."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.answering import LoadedModel, account, follow, generate, interval, pad
from kvjax.method import Method
from kvjax.stats import measure as measure_cache


def write_text(model: LoadedModel, prompts: Sequence[Sequence[int]], length: int, new_tokens: int) -> list[list[int]]:
    """The text that Full writes after each prompt, past the end of the answer: ``new_tokens`` ids for each prompt."""
    made = generate(model, prompts, "full", length=length, rows=len(prompts), new_tokens=new_tokens, eos_token_ids=())
    return made.ids


def measure_agreement(
    model: LoadedModel,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    method: Method,
    *,
    length: int,
) -> dict[str, Any]:
    """The share of next-token choices that agree with Full's, if the method has read Full's text up to that token.

    Args:
        model: the model.
        prompts: token ids, all of them in a single batch.
        texts: the texts that Full wrote, see `write_text`; all have the same length.
        method: the method.
        length: every prompt is padded to this number of tokens.

    Returns:
        A metric for `experiments.records.make_record`.
    """
    begun = time.monotonic()
    padded, lengths = pad(prompts, length)
    written = np.asarray(texts, np.int32)
    cache = kvjax.prefill(
        model.params, padded, config=model.config, method=method, lengths=lengths, max_new_tokens=written.shape[1]
    )
    choices, _, cache = follow(model.params, cache, jnp.asarray(written))
    stats = jax.device_get(measure_cache(cache))
    agree = (np.asarray(choices) == written).mean(axis=1)
    return {
        "name": "agreement",
        "length": length,
        "value": round(100 * float(agree.mean()), 2),
        "unit": "percent",
        "interval_95": interval(agree),
        "samples": len(prompts),
        "new_tokens": int(written.shape[1]),
        "rows": len(prompts),
        "seconds": round(time.monotonic() - begun, 2),
        **account([(len(prompts), stats)], len(prompts)),
    }
