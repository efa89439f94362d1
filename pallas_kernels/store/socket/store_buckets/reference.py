"""Plain JAX, for any number of tokens; tokens without a slot are dropped."""

import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.sign_codes import BLOCK, buckets, norms
from pallas_kernels.host import Rows, copy_row


def store_buckets(key, value, active, cursor, planes, ids, norm, *, rows=None):
    """Store the buckets of new tokens and the norms of their values, in plain JAX."""
    slots, real = norm.shape[2], active >= 0
    order = jnp.arange(active.shape[1], dtype=jnp.int32)[None] - jnp.sum(real, axis=1, dtype=jnp.int32)[:, None]
    slot = jnp.where(real, cursor[:, None] + order, slots)
    slot = jnp.where(slot < slots, slot, ids.shape[2] * BLOCK)  # dropped by both
    batch = jnp.arange(len(slot), dtype=jnp.int32)[:, None]
    bucket = buckets(_at(key, slot, slots, rows), planes).astype(ids.dtype)  # [B, H, T, L]
    block, place = slot // BLOCK, jnp.arange(len(planes), dtype=jnp.int32)[None, None] * BLOCK + (slot % BLOCK)[:, :, None]
    index = batch[:, :, None], slice(None), block[:, :, None], place  # [B, T, L], and of each all heads
    ids = ids.at[index].set(bucket.transpose(0, 2, 3, 1), mode="drop")
    new = norms(_at(value, slot, slots, rows)).astype(norm.dtype)
    return ids, norm.at[batch, :, slot].set(new.swapaxes(1, 2), mode="drop")


def _at(store: Array, slot: Array, slots: int, rows: Rows | None) -> Array:
    """Take ``slot`` int32 [B, T] of ``store`` [B, H, S or R, D]: [B, H, T, D]; anything where there is no such slot."""
    at = jnp.minimum(slot, slots - 1)
    at = at if rows is None else copy_row(at, rows.sinks, store.shape[2])
    return jnp.take_along_axis(store, at[:, None, :, None], axis=2, mode="clip")
