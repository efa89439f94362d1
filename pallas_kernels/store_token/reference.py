"""Storing a token in plain JAX: a slice update for one row, a scatter for several, each of which writes in place."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax


def store_token(key, value, place, *, cache_key, cache_value, cache_position, cursor, query, inv_freq):
    """See ``pallas_kernels.store_token.store_token``; returns the fields of `Stored`."""
    batch, heads, _ = key.shape
    stored, slots = cache_key.shape[1:3]
    if query is not None:
        query, key = _rotate(query, place, inv_freq), _rotate(key, place, inv_freq)
    if stored > heads:
        key, value = (jnp.repeat(x, stored // heads, axis=1) for x in (key, value))
    position = jnp.broadcast_to(place[:, None], (batch, stored))
    new = (key, value, position)
    caches = (cache_key, cache_value, cache_position)
    if batch == 1:
        # A clamped in-place write; the old row is put back where there is nothing to store.
        at = jnp.minimum(cursor[0], slots - 1)
        fits = (place[0] >= 0) & (cursor[0] < slots)
        put = lambda cache, x: lax.dynamic_update_slice_in_dim(  # noqa: E731
            cache, jnp.where(fits, x[:, :, None], lax.dynamic_slice_in_dim(cache, at, 1, 2)), at, 2
        )
    else:
        slot = jnp.where(place >= 0, cursor, slots)  # the slot S does not exist and is dropped
        row = jnp.arange(batch)
        put = lambda cache, x: cache.at[row, :, slot].set(x, mode="drop")  # noqa: E731
    written = (put(cache, x) for cache, x in zip(caches, new, strict=True))
    return *written, cursor + (place >= 0).astype(jnp.int32), query


def _rotate(x, place, inv_freq):
    """[B, ..., D] rotated at ``place`` int32 [B]."""
    angle = place.astype(jnp.float32)[:, None] * inv_freq[None]
    angle = angle.reshape(angle.shape[0], *(1,) * (x.ndim - 2), angle.shape[1])
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
