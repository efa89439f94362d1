"""What the end of a prompt looks at: attention of the last queries over the stored prompt, for methods that keep by it."""

from __future__ import annotations

import math

from jax import Array

from kvjax.cache import LayerCache
from kvjax.method import Prompt
from pallas_kernels.window_score import window_score


def window_votes(cache: LayerCache, prompt: Prompt) -> Array:
    """Attention probability each slot receives from the observation window, summed over the window's queries.

    The softmax is causal and over all stored keys, in float32; empty slots receive 0, and so do all slots from a query
    that is padding.

    Args:
        cache: the whole prompt, S slots.
        prompt: with the last W rotated queries of each row; the method's ``obs_window`` is W.

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
