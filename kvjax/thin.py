"""Storage whose older keys have some of their channels only, packed: what `kvjax.methods.ThinK` leaves of a prompt.

The newest tokens have whole keys, and so have all that come later. `ThinCache` has the interface of other storage, except
that nothing can be chosen from it: `kvjax.attention.attend_held` reads the packed keys as they are, and everything else gets
whole keys with zeros (`ThinCache.resident`).
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache, LayerStorage
from kvjax.selection import compact
from kvjax.typing import EMPTY, pytree, traced
from pallas_kernels import axes
from pallas_kernels.host import take_rows

# A packed key has a multiple of so many numbers: whole products of tensor cores, and rows that begin alike. In heads of fewer
# than 64 channels, which no large model has, it has a multiple of a quarter of the channels.
_ROW = 16


@pytree
class Older:
    """The tokens of a `ThinCache` whose keys have C channels, from slot 0 on in every head; 0 in empty slots."""

    key: Array  # [B, H, N, E], the C channels and zeros behind them; see `_ROW`
    value: Array  # [B, H, N, D]
    position: Array  # int32 [B, H, N]
    limit: Array  # int32 [B], the slots of the row's longest head that hold a token
    channels: Array  # int32 [B, H, C], ascending


@pytree
class ThinCache(LayerStorage):
    """Keys and values of one layer: packed keys in the first N slots, whole keys in the R slots behind them."""

    newer: LayerCache
    older: Older = traced()

    @property
    def key(self) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The whole keys, [B, H, R, D] in the dtype of the model."""
        return self.newer.key

    @property
    def value(self) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The values of the tokens whose keys are whole, [B, H, R, D]."""
        return self.newer.value

    @property
    def position(self) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Absolute token position int32 [B, H, N + R]; EMPTY if the slot holds no token."""
        return jnp.concatenate([self.older.position, self.newer.position], axis=2)

    @property
    def cursor(self) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The slot for the row's next token, int32 [B], at least N."""
        return self.newer.cursor + self.older.key.shape[2]

    @property
    def num_slots(self) -> int:
        return self.older.key.shape[2] + self.newer.num_slots

    @property
    def rows(self) -> None:
        return None

    def append(self, key: Array, value: Array, position: Array, start: Array | int | None = None) -> ThinCache:
        return dataclasses.replace(self, newer=self.newer.append(key, value, position))

    def append_rotated(
        self, query: Array, key: Array, value: Array, position: Array, inv_freq: Array
    ) -> tuple[Array, ThinCache]:
        query, newer = self.newer.append_rotated(query, key, value, position, inv_freq)
        return query, dataclasses.replace(self, newer=newer)

    def resident(self) -> LayerCache:
        older = self.older
        whole = jnp.zeros(older.value.shape, older.key.dtype)
        b, h = jnp.arange(whole.shape[0])[:, None, None], jnp.arange(whole.shape[1])[None, :, None]
        whole = whole.at[b, h, :, older.channels].set(older.key[..., : older.channels.shape[2]].swapaxes(2, 3))
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


def pick_channels(query: Array, older: Older) -> Array:
    """What meets the packed keys of a query [B, H, G, D]: its numbers in their channels, [B, H, G, E]."""
    picked = jnp.take_along_axis(query, older.channels[:, :, None], axis=3)
    return jnp.pad(picked, ((0, 0), (0, 0), (0, 0), (0, older.key.shape[3] - picked.shape[3])))


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
    dim = cache.key.shape[3]
    unit = min(_ROW, max(dim // 4, 1))
    wide = min(-(-channels.shape[2] // unit) * unit, dim)
    key = take_rows(jnp.take_along_axis(cache.key, channels[:, :, None], axis=3), slot)
    key = jnp.pad(key, ((0, 0), (0, 0), (0, 0), (0, wide - key.shape[3])))
    older = Older(
        key=jnp.where(kept[..., None], key, 0),
        value=jnp.where(kept[..., None], take_rows(cache.value, slot), 0),
        position=jnp.where(kept, jnp.take_along_axis(cache.position, slot, axis=2), EMPTY),
        limit=axes.most(jnp.sum(kept, axis=2, dtype=jnp.int32).max(axis=1)),
        channels=channels,
    )
    return ThinCache(newer=newer, older=older)
