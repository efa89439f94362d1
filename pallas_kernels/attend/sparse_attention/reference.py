"""Attention over listed blocks and columns in plain JAX: dense attention under a mask, a few queries and keys at a time.

The memory is bounded, but the work is as much as for dense attention.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import finite_or_zero, log_denominator, product_precision
from pallas_kernels.soft_cap import capped

QUERIES = 512  # queries at once, about
KEYS = 1024  # slots at once


def sparse_attention(query, key, value, *, distances, first, count, columns, num_columns, start, length, block, scale):
    """Attend causally to the listed blocks and columns, in plain JAX."""
    batch, heads, group, tokens, dim = query.shape
    slots, lists = key.shape[2], batch * heads * group
    blocks, key_blocks = first.shape[3], -(-slots // block)
    together = min(blocks, max(1, QUERIES // block))  # blocks of queries at once
    steps, width = -(-blocks // together), min(KEYS, slots)
    start, precision = jnp.asarray(start, jnp.int32), product_precision(query.dtype)
    total = start + length  # [B], real tokens in the cache
    short = steps * together - blocks
    query = jnp.pad(query, [(0, 0)] * 3 + [(0, steps * together * block - tokens), (0, 0)])
    first, count = (jnp.pad(x, [(0, 0)] * 3 + [(0, short)]) for x in (first, count))
    is_column = _mark(columns.reshape(lists, -1), num_columns.reshape(lists), slots)
    is_column = is_column.reshape(batch, heads, group, slots)
    most = min(distances.shape[3], key_blocks)  # entries of a list

    def attend(step):
        """Attend with the X queries of ``together`` blocks: output [B, H, G, X, D] and lse [B, H, G, X]."""
        begin = step * together
        mine, number = (lax.dynamic_slice_in_dim(x, begin, together, 3) for x in (first, count))
        own = start // block + begin + jnp.arange(together, dtype=jnp.int32)
        at = mine[..., None] + jnp.arange(most, dtype=jnp.int32).reshape(1, 1, 1, 1, -1)
        at = jnp.minimum(at, distances.shape[3] - 1).reshape(batch, heads, group, -1)
        there = own.reshape(1, 1, 1, -1, 1) - jnp.take_along_axis(distances, at, axis=3).reshape(*mine.shape, most)
        listed = _mark(there.reshape(-1, most), number.reshape(-1), key_blocks).reshape(*mine.shape, key_blocks)
        listed = listed | (jnp.arange(key_blocks, dtype=jnp.int32)[None] == own[:, None])[None, None, None]
        asked = start + begin * block + jnp.arange(together * block, dtype=jnp.int32)
        q = lax.dynamic_slice_in_dim(query, begin * block, together * block, 3)

        def add(index, carry):
            sums, maximum, out = carry
            # If the width does not divide S, the last step starts early; slots that the step before had are hidden.
            low = jnp.minimum(index * width, slots - width)
            slot = low + jnp.arange(width, dtype=jnp.int32)
            k, v = (lax.dynamic_slice_in_dim(x, low, width, 2) for x in (key, value))
            in_block = jnp.repeat(jnp.take(listed, slot // block, axis=4), block, axis=3)
            in_column = lax.dynamic_slice_in_dim(is_column, low, width, 3)[:, :, :, None]
            before = (slot // block)[None] < jnp.repeat(own, block)[:, None]
            real = (slot[None] < total[:, None]) & (slot >= index * width)[None]
            seen = in_block | (in_column & before[None, None, None])
            seen = seen & (slot[None] <= asked[:, None])[None, None, None] & real[:, None, None, None]
            logits = jnp.einsum("bhgtd,bhsd->bhgts", q, k, precision=precision, preferred_element_type=jnp.float32)
            logits = jnp.where(seen, capped(logits * scale), -jnp.inf)
            risen = lax.stop_gradient(jnp.maximum(maximum, jnp.max(logits, axis=-1)))
            shift = finite_or_zero(risen)
            decay, weight = jnp.exp(maximum - shift), jnp.exp(logits - shift[..., None])
            v = jnp.where(real[:, None, :, None], v, 0)  # a weight of 0 does not silence a NaN
            added = jnp.einsum(
                "bhgts,bhsd->bhgtd", weight.astype(value.dtype), v, precision=precision, preferred_element_type=jnp.float32
            )
            return sums * decay + jnp.sum(weight, axis=-1), risen, out * decay[..., None] + added

        shape = (batch, heads, group, together * block)
        carry = jnp.zeros(shape, jnp.float32), jnp.full(shape, -jnp.inf, jnp.float32), jnp.zeros((*shape, dim), jnp.float32)
        stop = jnp.minimum(start + (begin + together) * block, slots)
        sums, maximum, out = lax.fori_loop(0, (stop + width - 1) // width, add, carry)
        out = out / jnp.where(sums > 0, sums, 1)[..., None]
        real = (asked[None] < total[:, None])[:, None, None]
        lse = jnp.where(real, log_denominator(maximum, sums), -jnp.inf)
        return jnp.where(real[..., None], out, 0).astype(value.dtype), lse

    made = lax.map(attend, jnp.arange(steps, dtype=jnp.int32))
    out, lse = (jnp.moveaxis(x, 0, 3) for x in made)
    return out.reshape(query.shape)[..., :tokens, :], lse.reshape(query.shape[:4])[..., :tokens]


def _mark(index, count, size):
    """Mark the first ``count`` int32 [X] entries of ``index`` int32 [X, K]: bool [X, size]."""
    row = jnp.arange(len(index), dtype=jnp.int32)[:, None]
    listed = jnp.arange(index.shape[1], dtype=jnp.int32)[None] < count[:, None]
    return jnp.zeros((len(index), size), bool).at[row, jnp.where(listed, index, size)].set(True, mode="drop")
