"""Plain JAX: compare the buckets of all tokens with the buckets of one query head after the other."""

import jax.numpy as jnp
from jax import Array


def equal_buckets(query: Array, ids: Array, near: Array, first: int) -> Array:
    """Count the tables where keys [B, H, L, N] and queries [B, H, G, L] have equal buckets: int32 [B, H, G, N].

    Counts below two become 0, and so do all counts outside of the slots ``first`` to ``near`` int32 [B].
    """
    # One query head after the other: for all at once a GPU has too few registers.
    heads = [jnp.sum(ids == query[:, :, g, :, None], axis=2, dtype=jnp.int32) for g in range(query.shape[2])]
    equal, slot = jnp.stack(heads, axis=2), jnp.arange(ids.shape[3], dtype=jnp.int32)[None, None, None]
    inside = (slot >= first) & (slot < near[:, None, None, None])
    return jnp.where((equal >= 2) & inside, equal, 0)


def bucket_matches(query, ids, near, *, first, num_bits):
    """Mark the query heads that share a token's bucket in two tables or more, in plain JAX."""
    return equal_buckets(query, ids, near, first) > 0
