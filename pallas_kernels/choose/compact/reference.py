"""The true entries of masks as lists, in plain JAX."""

import jax.numpy as jnp


def compact(mask, capacity):
    """List the first true entries of each row of a mask, in plain JAX."""
    size = mask.shape[-1]
    rank = jnp.where(mask, jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1, capacity)
    flat = rank.reshape(-1, size)
    row = jnp.arange(flat.shape[0])[:, None]
    slot = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], flat.shape)
    slots = jnp.zeros((flat.shape[0], capacity), jnp.int32).at[row, flat].set(slot, mode="drop")
    count = jnp.sum(mask, axis=-1, dtype=jnp.int32)[..., None]
    keep = jnp.arange(capacity, dtype=jnp.int32).reshape((1,) * (mask.ndim - 1) + (-1,)) < count
    return slots.reshape(*mask.shape[:-1], capacity), keep
