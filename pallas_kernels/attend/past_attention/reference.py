"""Attention over the first slots of a cache in plain JAX: dense attention in which all other slots count as empty."""

import jax.numpy as jnp

from pallas_kernels.attend.dense_attention import dense_attention


def past_attention(query, key, value, *, count, scale):
    """Attend to the first slots of each row, in plain JAX."""
    batch, heads, _, tokens, _ = query.shape
    slot = jnp.arange(key.shape[2], dtype=jnp.int32)[None]
    seen = jnp.where(slot < count[:, None], 0, -1)
    return dense_attention(
        query, key, value, query_position=jnp.zeros((batch, tokens), jnp.int32),
        key_position=jnp.broadcast_to(seen[:, None], (batch, heads, key.shape[2])), scale=scale, limit=jnp.max(count),
        block=max(256, (1 << 21) // tokens) if tokens > 1024 else 1024, implementation="xla",
    )  # fmt: skip
