"""What the last queries of a prompt attend to, for methods that keep it."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.cache.divided import whole
from kvjax.method import Prompt
from kvjax.selection import smooth
from pallas_kernels import axes
from pallas_kernels.score.window_score import window_score


def window_votes(cache: LayerCache, prompt: Prompt) -> Array:
    """The attention probability that each slot receives from the observation window, summed over the window's queries.

    The softmax is causal, over all stored keys and in float32. Empty slots receive 0. Queries that are padding give nothing.

    Args:
        cache: the whole prompt, S slots; on one of several devices that have parts of them, its part.
        prompt: has the last W rotated queries of each row; W is the method's ``obs_window``.

    Returns:
        float32 [B, H, G, S], of the slots of all devices.
    """
    votes = window_score(
        prompt.query,
        cache.key,
        query_position=prompt.query_position,
        key_position=cache.position,
        scale=1 / math.sqrt(prompt.query.shape[-1]),
        axis=axes.SLOTS if cache.parts > 1 else None,
    )
    return whole(votes, cache, 3)


def newest_queries(prompt: Prompt, window: int) -> Prompt:
    """The prompt with its last ``window`` queries; a wrapper may have recorded more for another method."""
    query, position = prompt.query[..., -window:, :], prompt.query_position[:, -window:]
    return dataclasses.replace(prompt, query=query, query_position=position)


def prefix_votes(cache: LayerCache, prompt: Prompt, window: int, kernel: int, pooling: str) -> Array:
    """SnapKV's score of each slot: `window_votes`, pooled over neighbouring tokens, their mean over the group.

    The last tokens of each row are the window. It votes, and it is not pooled with the prefix.

    Args:
        cache: the whole prompt, S slots.
        prompt: as in `window_votes`, with at least ``window`` queries.
        window: tokens of the window.
        kernel: pooling window in slots.
        pooling: see `kvjax.selection.smooth`.

    Returns:
        float32 [B, H, S]; ``inf`` for the window.
    """
    votes = window_votes(cache, newest_queries(prompt, window))
    start = prompt.query_position.max(axis=1) + 1 - window
    position = whole(cache.position, cache)
    recent = position >= start[:, None, None]
    prefix = ((position >= 0) & ~recent)[:, :, None]
    outside = 0.0 if pooling == "avg" else -jnp.inf
    pooled = smooth(jnp.where(prefix, votes, outside), kernel, pooling).mean(axis=2)
    return jnp.where(recent, jnp.inf, pooled)
