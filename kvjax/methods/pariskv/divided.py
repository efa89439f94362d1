"""ParisKV where the slots of a row are divided over devices (`kvjax.cache.divided`): its kernels, with exchanges between.

Every device holds the counts of clusters over all devices, so it gives its keys the votes that a single device would give.
The cut among the votes needs the number of keys with each number of votes; the cut among the estimates needs each device's
best. A step sends a few hundred numbers per KV head.
"""

import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import Selection
from kvjax.cache import LayerStorage
from kvjax.cache.divided import best_slots, here, total
from pallas_kernels import axes
from pallas_kernels.choose.pariskv.collision import Part, collision
from pallas_kernels.choose.pariskv.rerank import Regions, estimates
from pallas_kernels.formats.key_codes import cluster_counts
from pallas_kernels.store.pariskv.encode import encode


def choose(
    query: Array,
    signs: Array,
    cache: LayerStorage,
    index: tuple[Array, Array, Array, Array],
    shares: Array,
    budget: Array | int,
    enough: Array,
    *,
    regions: Regions,
    capacity: int,
    scale: float,
) -> Selection:
    """Select the slots of this device that a step attends to: `collision` and `rerank` over all devices.

    Args:
        query: [B, H, G, D], rotated by RoPE.
        signs: of the rotation before encoding.
        index: ids and rows of this device's slots, counts over all devices, the slot that ends the zone.
    """
    ids, rows, counts, stop = index
    batch, heads, _ = cache.position.shape
    part = Part(begin=cache.first, number=axes.index(axes.SLOTS), every=_every)
    query, listed, count = collision(
        query, signs, counts, ids, cache.position, stop, shares, first=regions.sinks, capacity=capacity, part=part
    )
    score = estimates(query, listed, count, rows, scale=scale)
    best, found = best_slots(score, budget, regions.best, cache)
    best = jnp.take_along_axis(listed, best, axis=2) + cache.first
    shape = (batch, heads)
    sinks = jnp.broadcast_to(jnp.arange(regions.sinks, dtype=jnp.int32), (*shape, regions.sinks))
    near = jnp.arange(regions.tail, dtype=jnp.int32)[None, None] + stop[:, None, None]
    near = jnp.broadcast_to(near, (*shape, regions.tail))
    entries = jnp.concatenate([sinks, best, near], axis=2)
    mask = jnp.concatenate([jnp.ones(sinks.shape, bool), found, jnp.ones(near.shape, bool)], axis=2)
    grow = (0, 0), (0, 0), (0, max(regions.size - entries.shape[2], 0))
    entries, mask = jnp.pad(entries, grow), jnp.pad(mask, grow)
    dense = ((cache.cursor < enough) | (stop <= regions.sinks))[:, None, None]
    entries = jnp.where(dense, jnp.arange(entries.shape[2], dtype=jnp.int32)[None, None], entries)
    entries, mask = here(entries, (dense | mask) & (entries < cache.cursor[:, None, None]), cache)
    return Selection(slots=entries, mask=mask & jnp.take_along_axis(cache.valid, entries, axis=2))


def store(
    cache: LayerStorage,
    active: Array,
    signs: Array,
    index: tuple[Array, Array, Array, Array, Array],
    *,
    num_local: int,
    buffer: int,
    scale: float,
) -> tuple[Array, Array, Array, Array, Array]:
    """Store codes over all devices, as `store_codes`.

    Args:
        active: int32 [B, T], positions of the new tokens, EMPTY for none.
        signs: of the rotation before encoding.
        index: ids and rows of this device's slots; counts and the counts that wait, of all devices; the slot that ends the
            zone.

    Returns:
        The new ``index``.
    """
    ids, rows, counts, waiting, stop = index
    order = jnp.arange(active.shape[1], dtype=jnp.int32)[None]
    arrived = jnp.sum(active >= 0, axis=1, dtype=jnp.int32)
    at, mine = here((cache.cursor - arrived)[:, None] + order, active >= 0, cache)
    new = jnp.take_along_axis(cache.key, at[:, None, :, None], axis=2)
    row, at = jnp.arange(len(at))[:, None], jnp.where(mine, at, cache.num_slots)
    ids, rows = (
        old.at[row, :, at].set(made.swapaxes(1, 2), mode="drop")
        for old, made in zip((ids, rows), encode(new, mine[:, None], signs, scale=scale), strict=True)
    )
    beyond = cache.cursor - stop - num_local
    flushed = jnp.maximum(beyond, 0) // buffer * buffer
    turn = (stop + jnp.maximum(beyond - arrived, 0))[:, None] + order
    at, due = here(turn, turn < (stop + beyond)[:, None], cache)
    at = at[:, None]
    due = due[:, None] & jnp.take_along_axis(cache.valid, at, axis=2)
    ripe = jnp.where(due[..., None], jnp.take_along_axis(ids, at[..., None], axis=2).astype(jnp.int32) + 1, 0)
    ripe = total(ripe, cache)  # ids + 1 of the tokens that are due, from the devices that have them; 0 for none
    due, ripe = ripe[..., 0] > 0, jnp.maximum(ripe - 1, 0).astype(ids.dtype)
    now = (turn < (stop + flushed)[:, None])[:, None]
    flush = (flushed > 0)[:, None, None, None]
    counts = counts + jnp.where(flush, waiting, 0) + cluster_counts(ripe, due & now)
    waiting = jnp.where(flush, 0, waiting) + cluster_counts(ripe, due & ~now)
    return ids, rows, counts, waiting, stop + flushed


def _every(x: Array) -> Array:
    """Gather ``x`` from all devices of a row, [n, ...]."""
    return lax.all_gather(x, axes.SLOTS) if axes.is_split(axes.SLOTS) else x[None]
