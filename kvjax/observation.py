"""What the end of a prompt looks at: attention of the last queries over the stored prompt, for methods that keep by it."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.method import Prompt


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
    query = prompt.query.astype(jnp.float32) / math.sqrt(prompt.query.shape[-1])
    key = jnp.where(cache.valid[..., None], cache.key, 0).astype(jnp.float32)
    logits = jnp.einsum("bhgwd,bhsd->bhgws", query, key)
    asked = prompt.query_position[:, None, None, :, None]
    stored = cache.position[:, :, None, None, :]
    seen = (stored >= 0) & (stored <= asked)
    logits = jnp.where(seen, logits, -jnp.inf)
    top = jnp.maximum(logits.max(axis=-1, keepdims=True), jnp.finfo(jnp.float32).min)  # rows of padding: all -inf
    weight = jnp.exp(logits - top)
    weight = weight / jnp.maximum(weight.sum(axis=-1, keepdims=True), 1e-30)
    return weight.sum(axis=3)
