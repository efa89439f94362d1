"""Upkeep of the index in plain JAX."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.formats.key_codes import cluster_counts
from pallas_kernels.host import copy_row
from pallas_kernels.store.pariskv.encode import encode


def store_codes(
    key, position, active, cursor, signs, ids, code_rows, counts, waiting, stop, *, num_local, buffer, scale,
    rows=None,
):  # fmt: skip
    """Store the codes of new tokens, and count tokens that left the local window, in plain JAX."""
    tokens, slots = active.shape[1], position.shape[2]
    order = jnp.arange(tokens, dtype=jnp.int32)[None]
    arrived = jnp.sum(active >= 0, axis=1, dtype=jnp.int32)
    slot = jnp.where(active >= 0, (cursor - arrived)[:, None] + order, slots)
    at = jnp.minimum(slot, slots - 1)[:, None, :, None]
    at = at if rows is None else copy_row(at, rows.sinks, key.shape[2])
    made = encode(jnp.take_along_axis(key, at, axis=2), (active >= 0)[:, None], signs, scale=scale)
    ids, code_rows = (_put(store, new, slot) for store, new in zip((ids, code_rows), made, strict=True))
    # Tokens that have left the local window and are not counted yet: at most as many as have arrived. `ripe` are their ids.
    beyond = cursor - stop - num_local
    flushed = jnp.maximum(beyond, 0) // buffer * buffer
    turn = (stop + jnp.maximum(beyond - arrived, 0))[:, None] + order
    at = jnp.clip(turn, 0, slots - 1)[:, None]
    due = (turn < (stop + beyond)[:, None])[:, None] & (jnp.take_along_axis(position, at, axis=2) >= 0)
    now = turn[:, None] < (stop + flushed)[:, None, None]
    ripe = jnp.take_along_axis(ids, at[..., None], axis=2)
    flush = (flushed > 0)[:, None, None, None]
    counts = counts + jnp.where(flush, waiting, 0) + cluster_counts(ripe, due & now)
    waiting = jnp.where(flush, 0, waiting) + cluster_counts(ripe, due & ~now)
    return ids, code_rows, counts, waiting, stop + flushed


def _put(store: Array, new: Array, slot: Array) -> Array:
    """Put ``new`` [B, H, T, X] into ``store`` [B, H, S, X] at ``slot`` int32 [B, T]; a write to slot S is dropped."""
    if slot.shape == (1, 1):  # a slice update, which writes in place; a slot that does not exist keeps the old row
        start = jnp.minimum(slot[0, 0], store.shape[2] - 1)
        old = lax.dynamic_slice_in_dim(store, start, 1, 2)
        return lax.dynamic_update_slice_in_dim(store, jnp.where(slot[0, 0] < store.shape[2], new, old), start, 2)
    row = jnp.arange(slot.shape[0])[:, None]
    return store.at[row, :, slot].set(new.swapaxes(1, 2), mode="drop")
