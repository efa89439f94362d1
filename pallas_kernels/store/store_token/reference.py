"""The store of a token in plain JAX: a slice update for one row, a scatter for several; both write in place."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.quantised import Quantised, stored_like
from pallas_kernels.host import copy_row
from pallas_kernels.numerics import rotate_halves


def store_token(key, value, place, *, cache_key, cache_value, cache_position, cursor, query, inv_freq, rows=None):
    """Store one token per row, and rotate its key and query, in plain JAX; return the fields of `Stored`."""
    batch, heads, _ = key.shape
    slots = cache_position.shape[2]
    if query is not None:
        query, key = _rotate(query, place, inv_freq), _rotate(key, place, inv_freq)
    position = jnp.broadcast_to(place[:, None], (batch, heads))
    new = (key, value, position)
    caches = (cache_key, cache_value, cache_position)
    at = [cursor if rows is None else copy_row(cursor, rows.sinks, x.shape[2]) for x in caches[:2]]
    fits = (place >= 0) & (cursor < slots)

    def put(cache, x, at):
        if batch > 1:
            at = jnp.where(fits, at, cache.shape[2])  # an index behind the last slot is dropped
            return cache.at[jnp.arange(batch), :, at].set(x, mode="drop")
        # A clamped write in place; it writes the old row again if there is no token to store.
        at = jnp.minimum(at[0], cache.shape[2] - 1)
        old = lax.dynamic_slice_in_dim(cache, at, 1, 2)
        return lax.dynamic_update_slice_in_dim(cache, jnp.where(fits[0], x[:, :, None], old), at, 2)

    def put_all(cache, x, at):
        if not isinstance(cache, Quantised):
            return put(cache, x, at)
        new = stored_like(x, cache)  # all slots have their scales on the device
        codes, scale = put(cache.codes, new.codes, at), put(cache.scale, new.scale, cursor)
        return dataclasses.replace(cache, codes=codes, scale=scale)

    written = (put_all(cache, x, at) for cache, x, at in zip(caches, new, (*at, cursor), strict=True))
    return *written, cursor + (place >= 0).astype(jnp.int32), query


def _rotate(x, place, inv_freq):
    """Rotate ``x`` [B, ..., D] at ``place`` int32 [B]."""
    angle = place.astype(jnp.float32)[:, None] * inv_freq[None]
    angle = angle.reshape(angle.shape[0], *(1,) * (x.ndim - 2), angle.shape[1])
    return rotate_halves(x, angle).astype(x.dtype)
