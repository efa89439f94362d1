"""The 4-bit estimate, the best candidates by it and the list of a decode step, in plain JAX."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels import kth_select
from pallas_kernels.encode.reference import LEVEL, LEVELS, SLICE, parts_of_rows

SIGNED_LEVELS = tuple(-level for level in LEVELS) + LEVELS  # by nibble: bit 3 sign (1 is >= 0), bits 0-2 level


def estimate(query: Array, magnitudes: Array, weight: Array, scale: float) -> Array:
    """Estimated q.k from codes.

    Args:
        query: float32 [B, H, D], rotated.
        magnitudes: uint8 [B, H, K, D/2], of K keys.
        weight: bfloat16 [B, H, K, N].
        scale: as in `pallas_kernels.encode.encode`.

    Returns:
        float32 [B, H, K].
    """
    batch, heads, keys, _ = magnitudes.shape
    slices = weight.shape[-1]
    nibbles = jnp.stack([magnitudes & 15, magnitudes >> 4], axis=-1).astype(jnp.int32)
    signed = np.array(SIGNED_LEVELS, np.float32)
    direction = jnp.take(jnp.asarray(signed), nibbles, mode="clip").reshape(batch, heads, keys, slices, SLICE)
    dots = jnp.sum(direction * query.reshape(batch, heads, 1, slices, SLICE), axis=-1)
    total = jnp.sum(dots * weight.astype(jnp.float32), axis=-1) * (scale * LEVEL)
    return jnp.where(total == 0, 0.0, total)  # -0 would lose a tie against 0


def rerank(query, slots, count, rows, position, cursor, stop, budget, enough, *, regions, scale):
    """See ``pallas_kernels.rerank.rerank``."""
    batch, heads, stored = position.shape
    keep = jnp.arange(slots.shape[2], dtype=jnp.int32)[None, None] < count[..., None]
    slots = jnp.where(keep, slots, 0)
    score = estimate(query, *parts_of_rows(jnp.take_along_axis(rows, slots[..., None], axis=2)), scale)
    # A candidate must beat an empty entry even when its estimate is -inf.
    score = jnp.where(keep, jnp.maximum(score, jnp.finfo(jnp.float32).min), -jnp.inf)
    best, found = kth_select.kth_select_mask(score, budget, regions.best)
    best = jnp.take_along_axis(slots, best, axis=2)
    sinks = jnp.broadcast_to(jnp.arange(regions.sinks, dtype=jnp.int32), (batch, heads, regions.sinks))
    near = jnp.arange(regions.tail, dtype=jnp.int32)[None, None] + stop[:, None, None]
    near = jnp.broadcast_to(near, (batch, heads, regions.tail))
    listed = jnp.concatenate([sinks, best, near], axis=2)
    mask = jnp.concatenate([jnp.ones(sinks.shape, bool), found, jnp.ones(near.shape, bool)], axis=2)
    grow = ((0, 0), (0, 0), (0, regions.size - listed.shape[2]))
    dense = ((cursor < enough) | (stop <= regions.sinks))[:, None, None]
    listed = jnp.where(dense, jnp.arange(regions.size, dtype=jnp.int32)[None, None], jnp.pad(listed, grow))
    inside = listed < cursor[:, None, None]
    listed = jnp.minimum(listed, stored - 1)
    mask = (dense | jnp.pad(mask, grow)) & inside & (jnp.take_along_axis(position, listed, axis=2) >= 0)
    if regions.size <= stored:
        return listed, mask
    # Regions that a short cache cannot fill; what is masked may repeat a slot.
    b, h = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
    return kth_select.compact(jnp.zeros(position.shape, bool).at[b, h, listed].max(mask), stored)
