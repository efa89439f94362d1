"""Teacher forcing: lead a method along a given text, a decode step for each token, to see its predictions."""

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
    """Feed texts, int32 [B, N], padded on the right, through the decode path, where methods select.

    Run it under `jax.jit`. The cache holds the tokens before the texts and has room for them; ``counts``, int32 [B], are the
    texts' real tokens. ``see`` maps a step's number i and the logits after token i, [B, V], to a tree of arrays to keep. Its
    results are returned with a first axis N, with the cache. Steps behind a row's text see its last logits; steps behind the
    longest text are not run and hold zeros.
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
    """Score logits, [B, V], against the next token of each text, int32 [B].

    Returns the log-probability of each target in nats, float32 [B], and whether it is the most likely token, bool [B].
    """
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    picked = jnp.take_along_axis(log_probabilities, targets[:, None], axis=-1)[:, 0]
    return picked, jnp.argmax(logits, axis=-1) == targets
