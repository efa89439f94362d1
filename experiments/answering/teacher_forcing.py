"""A method led along a given text, one decode step a token: what it would have chosen, and how likely it found the text."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import kvjax
from kvjax.step import run_step


@functools.partial(jax.jit, donate_argnames="cache")
def follow(params: Any, cache: kvjax.Cache, tokens: Array) -> tuple[Array, Array, kvjax.Cache]:
    """Feeds a text through the decode path, where methods select.

    Args:
        params: model parameters.
        cache: holds what precedes the text, and room for it; it is consumed.
        tokens: int32 [B, N], the text.

    Returns:
        Most likely token before each of the text's, int32 [B, N]; log-probability of each of the text's, float32 [B, N]; the
        cache with the text.
    """

    def step(cache: kvjax.Cache, token: Array) -> tuple[kvjax.Cache, tuple[Array, Array]]:
        choice = jnp.argmax(cache.logits, axis=-1).astype(jnp.int32)
        found = jnp.take_along_axis(jax.nn.log_softmax(cache.logits), token[:, None], axis=-1)[:, 0]
        return run_step(params, cache, token[:, None], jnp.ones((cache.batch, 1), bool)), (choice, found)

    cache, (choices, found) = jax.lax.scan(step, cache, tokens.T)
    return choices.T, found.T, cache
