"""Decode attention over a cache in plain JAX: dense attention, of one query at a position behind all tokens."""

import jax.numpy as jnp

from pallas_kernels.attend.dense_attention.reference import dense_attention
from pallas_kernels.attend.dense_decode.rotation import places
from pallas_kernels.formats.quantised import whole
from pallas_kernels.numerics import even_block, finite_or_zero, product_precision
from pallas_kernels.soft_cap import capped

BLOCK = 1 << 20  # logits, slots x queries, that are in memory at once per query head
LEAST_BLOCK = 1024  # slots
ROTATED_BLOCK = 1024  # most slots whose keys are rotated at once


def slot_mass(query, key, lse, *, position, limit, scale, query_position=None, **_):
    """Compute each slot's probability under a softmax with ``lse`` [B, H, G], summed over the group: float32 [B, H, S].

    Of several queries at positions, whose ``lse`` is [B, H, G, T], the first is taken.
    """
    seen = (position >= 0) & (jnp.arange(key.shape[2], dtype=jnp.int32)[None, None] < limit[:, None, None])
    if query_position is not None:
        query, lse = query[..., 0, :], lse[..., 0]
        seen &= position <= query_position[:, None, :1]
    exact = product_precision(query.dtype)
    products = jnp.einsum("bhgd,bhsd->bhgs", query, whole(key), precision=exact, preferred_element_type=jnp.float32)
    weight = jnp.exp(capped(products * scale) - finite_or_zero(lse)[..., None])
    return jnp.where(seen[:, :, None], weight, 0).sum(axis=2)


def dense_decode(query, key, value, *, position, limit, scale, query_position=None, rotation=None):
    """Attend with one query per head, or with queries at positions, to all tokens below a limit, in plain JAX."""
    several = query_position is not None
    slot = jnp.arange(key.shape[2], dtype=jnp.int32)
    block = min(max(LEAST_BLOCK, BLOCK // query.shape[3]) if several else BLOCK, slot.size)
    if rotation is not None:
        block = even_block(slot.size, ROTATED_BLOCK)
    out, lse = dense_attention(
        query if several else query[..., None, :], whole(key), whole(value),
        query_position=(query_position if several else jnp.full((query.shape[0], 1), jnp.iinfo(jnp.int32).max, jnp.int32)),
        key_position=jnp.where(slot[None, None] < limit[:, None, None], position, -1), query_first=None, scale=scale,
        limit=None, block=block, turn=None if rotation is None else (places(position, rotation), rotation.inv_freq),
    )  # fmt: skip
    return (out, lse) if several else (out[..., 0, :], lse[..., 0])
