"""Teacher forcing: lead a method along a given text, a decode step for each token, to see its predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

import kvjax
from kvjax.decoding.decode import run_step


def follow[Seen](
    params: Any, cache: kvjax.Cache, tokens: Array, counts: Array, see: Callable[[Array, Array], Seen]
) -> tuple[Seen, kvjax.Cache]:
    """Feed texts through the decode path, where methods select. Run it under `jax.jit`.

    Args:
        params: model parameters.
        cache: holds the tokens before the texts, and has room for them.
        tokens: int32 [B, N], the texts, padded on the right.
        counts: int32 [B], real tokens of each text.
        see: maps a step's number i (int32) and the logits after token i, [B, V], to a tree of arrays to keep, such as the
            logits themselves or the result of `score`.

    Returns:
        The results of `see`, with a first axis N, and the cache, which now holds the texts. Steps after the end of a row's
        text see the logits after its last token; steps after the end of the longest text are not run and hold zeros.
    """
    shapes = jax.eval_shape(see, jnp.int32(0), cache.logits)
    seen = jax.tree.map(lambda part: jnp.zeros((tokens.shape[1], *part.shape), part.dtype), shapes)

    def step(at: Array, carry: tuple[kvjax.Cache, Seen]) -> tuple[kvjax.Cache, Seen]:
        cache, seen = carry
        cache = run_step(params, cache, lax.dynamic_slice_in_dim(tokens, at, 1, 1), (at < counts)[:, None])
        now = see(at, cache.logits)
        return cache, jax.tree.map(lambda kept, one: lax.dynamic_update_index_in_dim(kept, one, at, 0), seen, now)

    cache, seen = lax.fori_loop(jnp.int32(0), counts.max(), step, (cache, seen))
    return seen, cache


def score(logits: Array, targets: Array) -> tuple[Array, Array]:
    """Score predicted distributions against the next tokens of a text.

    Args:
        logits: [B, V].
        targets: int32 [B], the next token of each text.

    Returns:
        The log-probability of each target in nats, float32 [B], and whether it is the most likely token, bool [B].
    """
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    picked = jnp.take_along_axis(log_probabilities, targets[:, None], axis=-1)[:, 0]
    return picked, jnp.argmax(logits, axis=-1) == targets
