"""Blocked exact attention over a cache with holes, in plain JAX: FlashAttention-2's loop over blocks of keys."""

import jax
import jax.numpy as jnp

from pallas_kernels.attend.dense_attention.blocks import block_count, block_logits
from pallas_kernels.numerics import bounded_loop, finite_or_zero, log_denominator, product_precision

LEAST_BLOCK = 1024  # slots
FEW_BYTES = 1 << 23  # of keys that a decode step reads in one piece


def dense_attention(query, key, value, *, query_position, key_position, query_first, scale, limit, block, turn=None):
    """Attend to all tokens that each query sees, one block of keys at a time, in plain JAX; ``turn`` as in `block_logits`."""
    rows, heads, group, length, dim = query.shape
    if not key.shape[2]:
        return jnp.zeros((*query.shape[:4], value.shape[-1]), query.dtype), jnp.full(query.shape[:4], -jnp.inf, jnp.float32)
    flat = query.reshape(rows, heads, group * length, dim)
    precision = product_precision(query.dtype)
    # A small part of the keys: a block of values is copied, without those of empty slots, and a CPU's caches hold it.
    # One query copies little, and the loop itself takes longer than a small cache.
    whole = length == 1 and key.size * key.dtype.itemsize <= FEW_BYTES
    block = min(block, key.shape[2] if whole else max(LEAST_BLOCK, key.shape[2] // 16))

    def add_block(index, carry, operands):
        """Add one more block of keys to the running softmax: earlier sums are rescaled to the new maximum."""
        (total, maximum, out), (flat, key, value, query_position, key_position, query_first, turn) = carry, operands
        start, logits, visible = block_logits(
            index, flat, key, query_position, key_position, scale=scale, block=block, group=group, query_first=query_first,
            turn=turn,
        )  # fmt: skip
        logits = jnp.where(visible, logits, -jnp.inf)
        risen = jax.lax.stop_gradient(jnp.maximum(maximum, jnp.max(logits, axis=-1)))
        shift = finite_or_zero(risen)
        decay = jnp.exp(maximum - shift)
        weight = jnp.exp(logits - shift[..., None])
        held = jax.lax.dynamic_slice_in_dim(key_position, start, block, axis=2) >= 0
        part = jax.lax.dynamic_slice_in_dim(value, start, block, axis=2)
        part = jnp.where(held[..., None], part, 0)  # a weight of 0 does not silence a NaN
        added = jnp.einsum(
            "bhms,bhsd->bhmd", weight.astype(value.dtype), part, precision=precision, preferred_element_type=jnp.float32
        )
        return total * decay + jnp.sum(weight, axis=-1), risen, out * decay[..., None] + added

    shape = (rows, heads, group * length)
    carry = (
        jnp.zeros(shape, jnp.float32),
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros((*shape, value.shape[-1]), jnp.float32),
    )
    count = block_count(query_position, key_position, limit, block)
    most, operands = -(-key.shape[2] // block), (flat, key, value, query_position, key_position, query_first, turn)
    total, maximum, out = bounded_loop(add_block, most, count, carry, operands)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    lse = log_denominator(maximum, total)
    return out.astype(query.dtype).reshape(*query.shape[:4], -1), lse.reshape(rows, heads, group, length)
