"""Queries of several tokens in plain JAX."""

import jax.numpy as jnp

from pallas_kernels.numerics import rotate_halves


def chunk_query(query, real, first, inv_freq, *, num_local):
    """Rotate the queries of several tokens, and average their scoring queries, in plain JAX."""

    def rotated_at(place):  # [B or 1, T]
        return rotate_halves(now, (place.astype(jnp.float32)[..., None] * inv_freq[None, None])[:, None, None])

    order = jnp.arange(query.shape[3], dtype=jnp.int32)[None]
    now = query.astype(jnp.float32)
    rotated = rotated_at(first[:, None] + order).astype(query.dtype)
    among = (order < real[:, None])[:, None, None, :, None]
    total = jnp.where(among, rotated_at(num_local + order), 0).sum(axis=3)
    return total / jnp.maximum(real, 1).astype(jnp.float32)[:, None, None, None], rotated
