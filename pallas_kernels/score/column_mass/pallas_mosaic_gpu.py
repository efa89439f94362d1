"""Attention probability of every slot through Mosaic GPU, of one query for each head: `_mosaic_gpu.slot_weights`."""

import jax.numpy as jnp

from pallas_kernels._mosaic_gpu.slot_weights import check_weights, slot_weights


def column_mass(query, key, lse, *, query_position, key_position, scale, limit, block, reduce):
    """Sum each slot's attention probability over the query heads."""
    bound = jnp.full(query.shape[:1], key.shape[2], jnp.int32)
    return slot_weights(query[..., 0, :], key, lse[..., 0], key_position, bound=bound, last=query_position[:, 0], scale=scale)


def check(query, key, lse, *, query_position, key_position, scale, limit, block, reduce):
    """Raise ``NotImplementedError`` for several queries, the largest weight, and what `slot_weights` refuses."""
    if query.shape[3] != 1 or reduce != "sum":
        raise NotImplementedError(f"got {query.shape[3]} queries and {reduce=}, expected one and 'sum'")
    check_weights(query[..., 0, :], key)
