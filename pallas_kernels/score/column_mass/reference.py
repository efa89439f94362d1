"""Attention probability of every slot, in plain JAX: a loop over blocks of keys."""

import jax
import jax.numpy as jnp

from pallas_kernels.attend.dense_attention.blocks import block_count, block_logits
from pallas_kernels.numerics import bounded_loop, finite_or_zero


def column_mass(query, key, lse, *, query_position, key_position, scale, limit, block, reduce):
    """Sum each slot's attention probability, or take the largest, in plain JAX."""
    rows, heads, group, length, dim = query.shape
    flat = query.reshape(rows, heads, group * length, dim)
    shift = finite_or_zero(lse.reshape(rows, heads, group * length))

    def add_block(index, mass, operands):
        flat, key, shift, query_position, key_position = operands
        start, logits, visible = block_logits(
            index, flat, key, query_position, key_position, scale=scale, block=block, group=group
        )
        weight = jnp.exp(jnp.where(visible, logits - shift[..., None], -jnp.inf))
        before = jax.lax.dynamic_slice_in_dim(mass, start, block, axis=2)
        new = before + jnp.sum(weight, axis=2) if reduce == "sum" else jnp.maximum(before, jnp.max(weight, axis=2))
        return jax.lax.dynamic_update_slice_in_dim(mass, new, start, axis=2)

    count = block_count(query_position, key_position, limit, block)
    operands = flat, key, shift, query_position, key_position
    return bounded_loop(add_block, -(-key.shape[2] // block), count, jnp.zeros(key.shape[:3], jnp.float32), operands)
