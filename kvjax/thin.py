"""Storage whose older keys have some of their channels only, packed: what `kvjax.methods.ThinK` leaves of a prompt.

The newest tokens have whole keys, and so have all that come later. `ThinCache` has the interface of other storage, except
that nothing can be chosen from it: `kvjax.attention.attend_held` reads the packed keys as they are, and everything else gets
whole keys with zeros (`ThinCache.resident`).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import LayerCache, LayerStorage
from kvjax.selection import compact
from kvjax.typing import EMPTY, pytree, traced
from pallas_kernels.host import take_rows


@pytree
class Older:
    """The tokens in the first N slots of a `ThinCache`, whose keys have C channels; 0 in empty slots."""

    key: Array  # [B, H, N, C]
    value: Array  # [B, H, N, D]
    channels: Array  # int32 [B, H, C], ascending


@pytree
class ThinCache(LayerStorage):
    """Keys and values of one layer: packed keys in the first N slots, whole keys in the R slots behind them."""

    key: Array  # [B, H, R, D], in the dtype of the model
    value: Array  # [B, H, R, D]
    position: Array  # int32 [B, H, N + R], absolute token position; EMPTY if the slot holds no token
    cursor: Array  # int32 [B], the slot for the row's next token, at least N
    older: Older = traced()

    @property
    def rows(self) -> None:
        return None

    def append(self, key: Array, value: Array, position: Array, start: Array | int | None = None) -> ThinCache:
        return self._with(self._newer().append(key, value, position))

    def append_rotated(
        self, query: Array, key: Array, value: Array, position: Array, inv_freq: Array
    ) -> tuple[Array, ThinCache]:
        query, newer = self._newer().append_rotated(query, key, value, position, inv_freq)
        return query, self._with(newer)

    def resident(self) -> LayerCache:
        older = self.older
        whole = jnp.zeros(older.value.shape, older.key.dtype)
        b, h = jnp.arange(whole.shape[0])[:, None, None], jnp.arange(whole.shape[1])[None, :, None]
        whole = whole.at[b, h, :, older.channels].set(older.key.swapaxes(2, 3))
        return LayerCache(
            key=jnp.concatenate([whole, self.key], axis=2),
            value=jnp.concatenate([older.value, self.value], axis=2),
            position=self.position,
            cursor=self.cursor,
        )

    def rows_at(self, slots: Array) -> tuple[Array, Array]:
        return self.resident().rows_at(slots)

    def keys_between(self, slots: Array) -> Array:
        return self.keys_at(slots)

    def copied(self) -> Array:
        return self.cursor

    def _newer(self) -> LayerCache:
        """The slots that have whole keys."""
        first = self.older.key.shape[2]
        return LayerCache(
            key=self.key, value=self.value, position=self.position[:, :, first:], cursor=self.cursor - first
        )

    def _with(self, newer: LayerCache) -> ThinCache:
        first = self.older.key.shape[2]
        position = lax.dynamic_update_slice_in_dim(self.position, newer.position, first, 2)
        return dataclasses.replace(
            self, key=newer.key, value=newer.value, position=position, cursor=newer.cursor + first
        )


def thin(cache: LayerCache, channels: Array, whole: Array, most_whole: int, room: int) -> ThinCache:
    """The tokens of ``cache``, with some channels of most keys.

    Args:
        cache: resident, the last ``room`` slots empty.
        channels: int32 [B, H, C], ascending.
        whole: bool [B, H, S], tokens whose keys keep all channels.
        most_whole: the most of them in a head.
        room: tokens that may follow.
    """
    slots = max(cache.num_slots - room, 1)
    newer = cache.compact(*compact(cache.valid & whole, max(min(most_whole, slots), 1)), room)
    slot, kept = compact(cache.valid & ~whole, slots)
    key = take_rows(jnp.take_along_axis(cache.key, channels[:, :, None], axis=3), slot)
    older = Older(
        key=jnp.where(kept[..., None], key, 0),
        value=jnp.where(kept[..., None], take_rows(cache.value, slot), 0),
        channels=channels,
    )
    position = jnp.where(kept, jnp.take_along_axis(cache.position, slot, axis=2), EMPTY)
    return ThinCache(
        key=newer.key,
        value=newer.value,
        position=jnp.concatenate([position, newer.position], axis=2),
        cursor=newer.cursor + slots,
        older=older,
    )
