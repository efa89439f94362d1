"""Attention probabilities of a window of queries in plain JAX: two loops over blocks of keys."""

import jax
import jax.numpy as jnp

from pallas_kernels import axes
from pallas_kernels.numerics import finite_or_zero
from pallas_kernels.soft_cap import capped

BLOCK = 4096  # slots per step: the logits in memory are [B, H, G, W, BLOCK] float32


def of_all(total, maximum, axis):
    """Combine the softmax denominators and maxima of each device's slots: the total, and the shift it is relative to."""
    own, maximum = maximum, axes.most(maximum, axis)
    return axes.total(total * jnp.exp(own - finite_or_zero(maximum)), axis), maximum


def window_score(query, key, *, query_position, key_position, scale, axis=None, block: int = BLOCK):
    """Sum the attention probability of each slot over the window of queries, in plain JAX."""
    rows, heads, group, window, _ = query.shape
    num_slots = key.shape[2]
    block = max(min(block, num_slots), 1)
    query = query.astype(jnp.float32)
    asked = query_position[:, None, None, :, None]

    def logits(index):
        # If the block size does not divide S, the last block starts early; slots that the block before had are hidden.
        start = jnp.minimum(index * block, num_slots - block)
        part, position = (jax.lax.dynamic_slice_in_dim(x, start, block, axis=2) for x in (key, key_position))
        part = jnp.where((position >= 0)[..., None], part, 0).astype(jnp.float32)
        fresh = start + jnp.arange(block, dtype=jnp.int32) >= index * block
        position = jnp.where(fresh[None, None], position, -1)[:, :, None, None]
        product = jnp.einsum("bhgwd,bhsd->bhgws", query, part, precision=jax.lax.Precision.HIGHEST)
        return start, jnp.where((position >= 0) & (position <= asked), capped(scale * product), -jnp.inf)

    def add_total(index, carry):
        total, maximum = carry
        _, block_logits = logits(index)
        risen = jnp.maximum(maximum, block_logits.max(axis=-1))
        shift = finite_or_zero(risen)
        return total * jnp.exp(maximum - shift) + jnp.exp(block_logits - shift[..., None]).sum(axis=-1), risen

    shape = (rows, heads, group, window)
    blocks = -(-num_slots // block)
    carry = jnp.zeros(shape, jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32)
    total, maximum = jax.lax.fori_loop(0, blocks, add_total, carry)
    if axis is not None:
        total, maximum = of_all(total, maximum, axis)
    lift = finite_or_zero(maximum)[..., None]
    total = jnp.where(total > 0, total, 1)[..., None]

    def add_votes(index, votes):
        start, block_logits = logits(index)
        before = jax.lax.dynamic_slice_in_dim(votes, start, block, axis=3)
        new = (jnp.exp(block_logits - lift) / total).sum(axis=3)
        return jax.lax.dynamic_update_slice_in_dim(votes, before + new, start, axis=3)

    return jax.lax.fori_loop(0, blocks, add_votes, jnp.zeros((rows, heads, group, num_slots), jnp.float32))
