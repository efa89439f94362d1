"""Blocked exact attention over a cache with holes, in plain JAX: FlashAttention-2's loop over key blocks.

The logits in memory are never more than [B, H, G, T, block]. The number of blocks is a traced value, so a
long cache that is nearly empty costs what it holds, not its capacity. Under ``vmap`` with a batched bound the
loop runs to the largest bound and its slices become gathers: pass an unbatched ``limit`` there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import finite_or_zero, product_precision


def attention(query, key, value, *, query_position, key_position, scale, limit, block):
    """See ``dense_attention``."""
    rows, heads, group, length, dim = query.shape
    flat = query.reshape(rows, heads, group * length, dim)
    precision = product_precision(query.dtype)

    def add_block(index, carry):
        total, maximum, out = carry
        start, logits, visible = _logits(
            index, flat, key, query_position, key_position, scale=scale, block=block, group=group
        )
        logits = jnp.where(visible, logits, -jnp.inf)
        risen = jnp.maximum(maximum, jnp.max(logits, axis=-1))
        shift = finite_or_zero(risen)
        decay = jnp.exp(maximum - shift)
        weight = jnp.exp(logits - shift[..., None])
        held = jax.lax.dynamic_slice_in_dim(key_position, start, block, axis=2) >= 0
        part = jax.lax.dynamic_slice_in_dim(value, start, block, axis=2)
        part = jnp.where(held[..., None], part, 0)  # a weight of 0 does not silence a NaN
        added = jnp.einsum(
            "bhms,bhsd->bhmd",
            weight.astype(value.dtype),
            part,
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return total * decay + jnp.sum(weight, axis=-1), risen, out * decay[..., None] + added

    shape = (rows, heads, group * length)
    carry = (
        jnp.zeros(shape, jnp.float32),
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros((*shape, value.shape[-1]), jnp.float32),
    )
    count = _block_count(query_position, key_position, limit, block)
    total, maximum, out = jax.lax.fori_loop(0, count, add_block, carry)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    lse = finite_or_zero(maximum) + jnp.log(total)
    return out.astype(query.dtype).reshape(query.shape), lse.reshape(rows, heads, group, length)


def column_mass(query, key, lse, *, query_position, key_position, scale, limit, block):
    """See ``pallas_kernels.dense_attention.column_mass``."""
    rows, heads, group, length, dim = query.shape
    flat = query.reshape(rows, heads, group * length, dim)
    shift = finite_or_zero(lse.reshape(rows, heads, group * length))

    def add_block(index, mass):
        start, logits, visible = _logits(
            index, flat, key, query_position, key_position, scale=scale, block=block, group=group
        )
        weight = jnp.exp(jnp.where(visible, logits - shift[..., None], -jnp.inf))
        before = jax.lax.dynamic_slice_in_dim(mass, start, block, axis=2)
        return jax.lax.dynamic_update_slice_in_dim(mass, before + jnp.sum(weight, axis=2), start, axis=2)

    count = _block_count(query_position, key_position, limit, block)
    return jax.lax.fori_loop(0, count, add_block, jnp.zeros(key.shape[:3], jnp.float32))


def _logits(index, flat, key, query_position, key_position, *, scale, block, group):
    """First slot of block ``index``, its logits [B, H, G*T, block] and which of them are visible."""
    slots = key.shape[2]
    # Where block does not divide S the last block starts early instead of padding a copy of the cache; the
    # slots it shares with the one before are hidden, so each counts once.
    start = jnp.minimum(index * block, slots - block)
    part = jax.lax.dynamic_slice_in_dim(key, start, block, axis=2)
    logits = scale * jnp.einsum(
        "bhmd,bhsd->bhms",
        flat,
        part,
        precision=product_precision(flat.dtype),
        preferred_element_type=jnp.float32,
    )
    position = jax.lax.dynamic_slice_in_dim(key_position, start, block, axis=2)
    fresh = start + jnp.arange(block) >= index * block
    position = jnp.where(fresh[None, None], position, -1)[:, :, None]
    asked = jnp.tile(query_position, (1, group))[:, None, :, None]
    return start, logits, (position >= 0) & (position <= asked)


def _block_count(query_position, key_position, limit, block):
    """Number of key blocks that hold a slot some query may see."""
    slots = key_position.shape[2]
    if limit is None:
        last = jnp.max(query_position, axis=1)[:, None, None]
        seen = (key_position >= 0) & (key_position <= last)
        limit = jnp.max(jnp.where(seen, jnp.arange(1, slots + 1)[None, None], 0))
    return (jnp.clip(jnp.asarray(limit, jnp.int32), 0, slots) + block - 1) // block
