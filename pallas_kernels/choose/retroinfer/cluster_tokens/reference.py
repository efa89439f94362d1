"""Lists of the tokens of clusters in plain JAX."""

import jax
import jax.numpy as jnp


def cluster_tokens(listed, ends, start, order, near, count, *, first, most, newest):
    """List the tokens of the listed clusters and of both ends of the row, in plain JAX."""
    entry = jnp.arange(most, dtype=jnp.int32)
    at = jax.vmap(jax.vmap(lambda ends: jnp.searchsorted(ends, entry, side="right")))(ends)
    at = jnp.minimum(at, listed.shape[2] - 1)

    def own(values, index):
        return jnp.take_along_axis(values, index, axis=2, mode="clip")

    before = jnp.where(at > 0, own(ends, jnp.maximum(at - 1, 0)), 0)
    token = own(order, own(start, own(listed, at)) + entry[None, None] - before)
    shape = listed.shape[:2]
    sinks = jnp.broadcast_to(jnp.arange(first, dtype=jnp.int32)[None, None], (*shape, first))
    ahead = near[:, None, None] + jnp.arange(newest, dtype=jnp.int32)[None, None]
    ahead = jnp.broadcast_to(ahead, (*shape, newest))
    held = count[:, None, None]
    mask = jnp.concatenate([sinks < held, entry[None, None] < ends[:, :, -1:], ahead < held], axis=2)
    return jnp.where(mask, jnp.concatenate([sinks, token, ahead], axis=2), 0), mask
