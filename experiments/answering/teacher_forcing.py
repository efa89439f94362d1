"""A method is led along a given text, a decode step for each token, to see how likely it finds the text."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import kvjax
from kvjax.parallel import on_devices
from kvjax.step import run_step


@functools.partial(jax.jit, donate_argnames="cache")
def follow(params: Any, cache: kvjax.Cache, tokens: Array) -> tuple[Array, Array, kvjax.Cache]:
    """Feeds a text through the decode path, where methods select.

    Args:
        params: model parameters.
        cache: holds the tokens before the text, and has room for the text; it is consumed.
        tokens: int32 [B, N], the text. If the cache is on a mesh, so are they (`kvjax.plan.place_rows`).

    Returns:
        For each token of the text: the token that was most likely instead, int32 [B, N], and the log-probability of the
        text's token, float32 [B, N]. And the cache, which holds the text now.
    """
    return on_devices(_follow, params, cache, (tokens,), lambda row, _: (row,), lambda specs, row: (row, row, specs))


def _follow(params: Any, cache: kvjax.Cache, tokens: Array) -> tuple[Array, Array, kvjax.Cache]:
    """`follow` on one device."""

    def step(cache: kvjax.Cache, token: Array) -> tuple[kvjax.Cache, tuple[Array, Array]]:
        choice = jnp.argmax(cache.logits, axis=-1).astype(jnp.int32)
        log_probability = jnp.take_along_axis(jax.nn.log_softmax(cache.logits), token[:, None], axis=-1)[:, 0]
        return run_step(params, cache, token[:, None], jnp.ones((cache.batch, 1), bool)), (choice, log_probability)

    cache, (choices, log_probabilities) = jax.lax.scan(step, cache, tokens.T)
    return choices.T, log_probabilities.T, cache
