"""Attention of a prompt chunk in plain JAX: dense attention with the positions that the chunk implies."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attend.dense_attention import dense_attention
from pallas_kernels.numerics import finite_or_zero, log_denominator, product_precision
from pallas_kernels.soft_cap import capped

ROWS, BLOCK = 64, 192  # queries that skip together, and slots that they skip


def _block(tokens: int) -> int:
    """Choose the keys per step of the loop: one or two million logits per query head."""
    return max(256, min(max(1024, (1 << 20) // tokens), (1 << 21) // tokens))


def prefix_attention(query, key, value, *, start, length, scale, threshold):
    """Attend to a chunk's own tokens causally, and to all slots before them, in plain JAX."""
    batch, heads, _, tokens, _ = query.shape
    slots = key.shape[2]
    first = jnp.broadcast_to(jnp.asarray(start, jnp.int32), (batch,))
    own = jnp.full((batch,), tokens, jnp.int32) if length is None else length
    if threshold is not None:
        return _skipping(query, key, value, first, own, scale, threshold)
    step, slot = (jnp.arange(n, dtype=jnp.int32)[None] for n in (tokens, slots))
    held = jnp.where(slot < (first + own)[:, None], slot, -1)
    return dense_attention(
        query,
        key,
        value,
        query_position=jnp.where(step < own[:, None], first[:, None] + step, -1),
        key_position=jnp.broadcast_to(held[:, None], (batch, heads, slots)),
        scale=scale,
        limit=jnp.max(first) + tokens,
        block=_block(tokens),
        implementation="xla",
    )


def _skipping(query, key, value, first, own, scale, threshold):
    """Attend without the blocks that the threshold skips, 64 queries at a time; a step holds their logits with all slots."""
    tokens, precision = query.shape[3], product_precision(query.dtype)
    query = jnp.pad(query, [(0, 0)] * 3 + [(0, -tokens % ROWS), (0, 0)])
    key, value = (jnp.pad(x, [(0, 0)] * 2 + [(0, -x.shape[2] % BLOCK), (0, 0)]) for x in (key, value))
    slot = jnp.arange(key.shape[2], dtype=jnp.int32)[None]
    value = jnp.where((slot < (first + own)[:, None])[:, None, :, None], value, 0)  # a weight of 0 does not silence a NaN

    def strip(begin):
        asking = lax.dynamic_slice_in_dim(query, begin, ROWS, 3)
        token = begin + jnp.arange(ROWS, dtype=jnp.int32)[None, :, None]
        seen = ((slot[None] <= first[:, None, None] + token) & (token < own[:, None, None]))[:, None, None]
        logits = jnp.einsum("bhgtd,bhsd->bhgts", asking, key, precision=precision, preferred_element_type=jnp.float32)
        logits = jnp.where(seen, capped(logits * scale), -jnp.inf)
        largest = logits.reshape(*logits.shape[:4], -1, BLOCK).max(axis=5)
        least = finite_or_zero(lax.cummax(largest, axis=4, reverse=True)) - threshold[..., None, None]
        read = ((largest >= least) & (largest > -jnp.inf)).any(axis=3, keepdims=True).at[..., 0].set(True)
        logits = jnp.where(jnp.repeat(read, BLOCK, axis=4), logits, -jnp.inf)
        highest = lax.stop_gradient(logits.max(axis=4))
        weight = jnp.exp(logits - finite_or_zero(highest)[..., None])
        total = weight.sum(axis=4)
        out = jnp.einsum(
            "bhgts,bhsd->bhgtd", weight.astype(value.dtype), value, precision=precision, preferred_element_type=jnp.float32
        )
        return (out / jnp.where(total > 0, total, 1)[..., None]).astype(value.dtype), log_denominator(highest, total)

    out, lse = (jnp.moveaxis(x, 0, 3) for x in lax.map(strip, jnp.arange(0, query.shape[3], ROWS, dtype=jnp.int32)))
    return out.reshape(query.shape)[..., :tokens, :], lse.reshape(query.shape[:4])[..., :tokens]
