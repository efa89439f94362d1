"""Causal attention of whole sequences in plain JAX, in blocks of queries where sequences are long."""

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import product_precision
from pallas_kernels.soft_cap import capped

BLOCK = 512  # queries whose logits are formed at once


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, scale: float, window: int | None = None
) -> jax.Array:
    """Attend to each query's own and earlier tokens, in plain JAX."""
    length = query.shape[3]
    if length <= BLOCK:
        return _rows(query, key, value, jnp.arange(length), scale, window)
    # One block of queries meets all keys at a time. Half of that work is masked away, but the loop is a scan for every T, and
    # recomputing each block keeps the backward pass to one block of logits too.
    blocks = -(-length // BLOCK)
    padded = jnp.pad(query, [(0, 0)] * 3 + [(0, blocks * BLOCK - length), (0, 0)])
    split = jnp.moveaxis(padded.reshape(*query.shape[:3], blocks, BLOCK, -1), 3, 0)
    # Padding has the position of the last token: with a window it would otherwise see nothing, and its gradient would be NaN.
    position = jnp.minimum(jnp.arange(blocks * BLOCK), length - 1).reshape(blocks, BLOCK)
    block = jax.checkpoint(lambda pair: _rows(pair[0], key, value, pair[1], scale, window))
    out = jnp.moveaxis(jax.lax.map(block, (split, position)), 0, 3)
    return out.reshape(padded.shape)[..., :length, :]


def _rows(
    query: jax.Array, key: jax.Array, value: jax.Array, position: jax.Array, scale: float, window: int | None = None
) -> jax.Array:
    precision = product_precision(query.dtype)
    logits = jnp.einsum("bhgtd,bhsd->bhgts", query, key, precision=precision, preferred_element_type=jnp.float32)
    slot = jnp.arange(key.shape[2])[None, :]
    visible = slot <= position[:, None]
    if window is not None:
        visible = visible & (slot > position[:, None] - window)
    logits = jnp.where(visible[None, None, None], capped(logits * scale), -jnp.inf)
    weight = jax.nn.softmax(logits, axis=-1).astype(value.dtype)
    out = jnp.einsum("bhgts,bhsd->bhgtd", weight, value, precision=precision, preferred_element_type=jnp.float32)
    return out.astype(query.dtype)
