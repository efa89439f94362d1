"""Measures the distance of a method's next-token distributions from Full's, along prose and along Full's own text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.answering import LoadedModel, account
from experiments.lab.ablations.measure import generate
from experiments.lab.fidelity import Programs, Texts, distance
from experiments.records import bootstrap_interval
from kvjax.protocol.method import Method


def write_text(model: LoadedModel, prompts: Sequence[Sequence[int]], length: int, new_tokens: int) -> list[list[int]]:
    """Generate Full's text after each prompt, past the end of the answer: ``new_tokens`` ids for each prompt."""
    made = generate(model, prompts, "full", length=length, rows=len(prompts), new_tokens=new_tokens, eos_token_ids=())
    return made.ids


def measure_distance(
    programs: Programs, texts: Texts, method: Method, full: Array, *, name: str, length: int
) -> dict[str, Any]:
    """Measure KL(Full || method) per token, in nats, along given texts.

    Args:
        programs: the model's compiled programs.
        texts: contexts and the tokens that follow them; all texts are decoded in one batch.
        method: the method.
        full: Full's logits along the texts, float32 [T, B, V].
        name: name of the metric.
        length: tokens of context and text, for the record.

    Returns:
        A metric for `experiments.records.make_record`. "scores" are the means of each text.
    """
    begun = time.monotonic()
    logits, stats = programs.run(method, texts)
    found = jax.device_get(distance(full, logits, jnp.asarray(texts.targets)))
    real = np.arange(texts.steps)[:, None] < texts.counts[None]
    means = {field: np.where(real, value, 0).sum(axis=0) / texts.counts for field, value in vars(found).items()}
    return {
        "name": name,
        "length": length,
        "value": float(f"{means['kl'].mean():.4g}"),
        "unit": "nats",
        "interval_95": [float(f"{end:.4g}") for end in bootstrap_interval(means["kl"])],
        "scores": [float(f"{value:.4g}") for value in means["kl"]],
        "same_top_percent": round(100 * float(means["agrees"].mean()), 2),
        "perplexity": round(float(np.exp(means["loss"].mean())), 4),
        "full_perplexity": round(float(np.exp(means["full_loss"].mean())), 4),
        "samples": len(texts),
        "new_tokens": texts.steps,
        "rows": len(texts),
        "seconds": round(time.monotonic() - begun, 2),
        **account([(len(texts), jax.device_get(stats))], len(texts)),
    }
