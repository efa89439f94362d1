"""Scores of prompt slots from the attention of the prompt's last queries, for methods that keep the best slots."""

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.cache.divided import whole
from kvjax.protocol.method import Prompt
from kvjax.selection import smooth
from pallas_kernels import axes
from pallas_kernels.score.window_score import window_score


def window_votes(cache: LayerCache, prompt: Prompt) -> Array:
    """Compute the attention probability that each slot receives from the observation window, summed over its queries.

    The softmax is causal, over all stored keys and in float32. Empty slots receive 0. Queries that are padding give nothing.

    Args:
        cache: the whole prompt, S slots; this device's part where a mesh divides the slots.
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
    """Keep only the last ``window`` queries of the prompt; a wrapper may have recorded more for another method."""
    query, position = prompt.query[..., -window:, :], prompt.query_position[:, -window:]
    return dataclasses.replace(prompt, query=query, query_position=position)


def prefix_votes(cache: LayerCache, prompt: Prompt, window: int, kernel: int) -> Array:
    """Score each slot as SnapKV does: `window_votes`, pooled over neighbouring tokens, then averaged over the group.

    The window is the last ``window`` tokens of each row. It votes, and it is not pooled with the prefix.

    Args:
        cache: the whole prompt, S slots.
        prompt: as in `window_votes`, with at least ``window`` queries.
        window: tokens of the window.
        kernel: pooling window in slots.

    Returns:
        float32 [B, H, S]; ``inf`` for the window.
    """
    votes = window_votes(cache, newest_queries(prompt, window))
    start = prompt.query_position.max(axis=1) + 1 - window
    position = whole(cache.position, cache)
    recent = position >= start[:, None, None]
    prefix = ((position >= 0) & ~recent)[:, :, None]
    pooled = smooth(jnp.where(prefix, votes, 0.0), kernel, "avg").mean(axis=2)
    return jnp.where(recent, jnp.inf, pooled)
