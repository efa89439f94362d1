"""The best candidates by the 4-bit estimate and the list of a decode step, in plain JAX."""

import jax.numpy as jnp

from pallas_kernels.choose.compact import compact
from pallas_kernels.choose.kth_select import kth_select_mask
from pallas_kernels.formats.key_codes import estimate, parts_of_rows


def estimates(query, slots, count, rows, *, scale):
    """Estimate the product of the query with each candidate, in plain JAX."""
    keep = jnp.arange(slots.shape[2], dtype=jnp.int32)[None, None] < count[..., None]
    slots = jnp.where(keep, slots, 0)
    score = estimate(query, *parts_of_rows(jnp.take_along_axis(rows, slots[..., None], axis=2)), scale)
    # A candidate must beat an empty entry even when its estimate is -inf.
    return jnp.where(keep, jnp.maximum(score, jnp.finfo(jnp.float32).min), -jnp.inf)


def rerank(query, slots, count, rows, position, cursor, stop, budget, enough, *, regions, scale):
    """List the best candidates by estimate between the first and the last slots, in plain JAX."""
    batch, heads, stored = position.shape
    keep = jnp.arange(slots.shape[2], dtype=jnp.int32)[None, None] < count[..., None]
    slots = jnp.where(keep, slots, 0)
    score = estimates(query, slots, count, rows, scale=scale)
    best, found = kth_select_mask(score, budget, regions.best)
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
    # A short cache cannot fill the regions. Masked entries may repeat a slot, so list the slots once more, each only once.
    b, h = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
    return compact(jnp.zeros(position.shape, bool).at[b, h, listed].max(mask), stored)
