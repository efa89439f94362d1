"""Values of tokens by partial keys in plain JAX."""

import jax.numpy as jnp

from pallas_kernels.numerics import product_precision


def partial_score(query, key, position, cursor, alpha, *, scale):
    """Score tokens by partial keys, and count those near the largest logit, in plain JAX."""
    exact = product_precision(key.dtype)
    key = key[..., : position.shape[2]]
    logits = jnp.einsum("bhgc,bhcs->bhgs", query, key, precision=exact, preferred_element_type=jnp.float32) * scale
    held = position >= 0
    newest = jnp.arange(key.shape[3], dtype=jnp.int32)[None, None] == cursor[:, None, None] - 1
    others = held & ~newest
    masked = jnp.where(others[:, :, None], logits, -jnp.inf)
    near = (masked >= masked.max(axis=3, keepdims=True) - alpha) & others[:, :, None]
    score = jnp.maximum(logits.mean(axis=2), jnp.finfo(jnp.float32).min)  # above -inf, which stands for an empty slot
    score = jnp.where(others, score, jnp.where(newest & held, jnp.inf, -jnp.inf))
    return score, jnp.sum(near, axis=(1, 2, 3), dtype=jnp.int32), jnp.sum(others, axis=2, dtype=jnp.int32)
