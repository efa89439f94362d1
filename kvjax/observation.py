"""Attention of a prompt's last queries over the prompt, for methods that keep what these queries attend to."""

from __future__ import annotations

import math

from jax import Array

from kvjax.cache import LayerCache
from kvjax.method import Prompt
from pallas_kernels.window_score import window_score


def window_votes(cache: LayerCache, prompt: Prompt) -> Array:
    """The attention probability that each slot receives from the observation window, summed over the window's queries.

    The softmax is causal, over all stored keys and in float32. Empty slots receive 0. Queries that are padding give nothing.

    Args:
        cache: the whole prompt, S slots.
        prompt: has the last W rotated queries of each row; W is the method's ``obs_window``.

    Returns:
        float32 [B, H, G, S].
    """
    return window_score(
        prompt.query,
        cache.key,
        query_position=prompt.query_position,
        key_position=cache.position,
        scale=1 / math.sqrt(prompt.query.shape[-1]),
    )
