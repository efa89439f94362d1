"""Attention over packed blocks in plain JAX: every listed token is unpacked."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.formats.packed_vectors import join_terms, segments_of, unpack
from pallas_kernels.numerics import finite_or_zero, join_pieces, sum_pieces
from pallas_kernels.soft_cap import capped

BLOCK = 512  # tokens that are unpacked at once


def packed_attention(parts, query, key, value, basis, blocks, count, last, recent, *, scale, granule, span, owner):
    """Attend to the listed packed blocks and the raw buffer in one softmax, in plain JAX."""
    (rows, heads, listed), dim = blocks.shape, query.shape[-1]
    slot = blocks[..., None] * granule + jnp.arange(granule, dtype=jnp.int32)[None, None, None]
    slot = slot.reshape(rows, heads, -1)
    seen = jnp.repeat(jnp.arange(listed)[None, None] < count[..., None], granule, axis=2)
    slot = jnp.where(seen, slot, 0)

    def take(packed: tuple[Array, Array], slot: Array, seen: Array) -> Array:
        values, bitmap = (jnp.take_along_axis(x, slot[..., None], axis=2) for x in packed)
        return jnp.where(seen[..., None], unpack(values, bitmap, dim), 0).astype(jnp.float32)

    segment = segments_of(jnp.where(seen, slot // granule, 0), owner, last, span)
    asked, segments = join_terms(parts), jnp.arange(parts.shape[2], dtype=jnp.int32)[None, None, None, :, None]

    def multiplied(slot: Array, seen: Array, segment: Array) -> Array:
        each = jnp.einsum("bhmge,bhke->bhgmk", asked, take(key, slot, seen), precision=lax.Precision.HIGHEST)
        return jnp.where(segment[:, :, None, None] == segments, each, 0).sum(axis=3)

    def summed(slot: Array, seen: Array, segment: Array, weight: Array) -> Array:
        packed = jnp.where(segment[:, :, None, None] == segments, weight[..., None, :], 0)  # [B, H, G, M, K]
        return jnp.einsum("bhgmk,bhke->bhgme", packed, take(value, slot, seen), precision=lax.Precision.HIGHEST)

    logits = join_pieces(multiplied, BLOCK, slot, seen, segment)
    recent_key, recent_value, stored = recent
    held = stored[..., None] >= 0
    recent_key, recent_value = (jnp.where(held, x, 0).astype(jnp.float32) for x in (recent_key, recent_value))
    newest = jnp.einsum("bhgd,bhsd->bhgs", query.astype(jnp.float32), recent_key, precision=lax.Precision.HIGHEST)
    logits = capped(jnp.concatenate([logits, newest], axis=-1) * scale)
    visible = jnp.concatenate([seen, stored >= 0], axis=-1)[:, :, None]
    logits = jnp.where(visible, logits, -jnp.inf)
    weight = jnp.exp(logits - finite_or_zero(lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    weight = weight / jnp.where(total > 0, total, 1)
    out = sum_pieces(summed, BLOCK, slot, seen, segment, weight[..., : listed * granule])
    out = jnp.einsum("bhgme,bhmed->bhgd", out, basis, precision=lax.Precision.HIGHEST)
    newest = jnp.einsum("bhgs,bhsd->bhgd", weight[..., listed * granule :], recent_value, precision=lax.Precision.HIGHEST)
    return (out + newest).astype(query.dtype)
