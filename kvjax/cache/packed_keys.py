"""Storage whose older keys have only some of their channels, packed: what `kvjax.methods.ThinK` stores of a prompt.

The newest tokens have whole keys, and so have all later tokens. `ThinCache` has the interface of other storage, except that
``key`` and ``value`` hold the newer slots alone. A step attends to all slots, and
`kvjax.attention.over_cache.attend_held` reads the packed keys as they are. An `extend` gets all slots with a zero for each
dropped channel (`ThinCache.resident`).

Keys may also have more channels than the model's: `biased` keys have two that add a bias to the token's logit, because a
query gets a one there. So every operation that takes keys of another width than values takes a bias for each slot.

Slots are counted over both parts, older slots first. Between the parts are empty slots, more in rows with shorter prompts.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from kvjax.cache.storage import LayerCache, LayerStorage, Older, PlainCache, empty_cache
from kvjax.protocol.typing import EMPTY, pytree, traced
from kvjax.selection import compact
from pallas_kernels import axes
from pallas_kernels.host import take_rows

# A packed key has a multiple of `_ROW` channels: whole products of tensor cores, and aligned rows. In heads of fewer than 64
# channels, which no large model has, it has a multiple of a quarter of the channels.
_ROW = 16


@pytree
class ThinCache(LayerStorage):
    """Keys and values of one layer: packed keys in the first N slots, whole keys in the R slots after them."""

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
        return PlainCache(
            key=jnp.concatenate([widened(older, self.key.shape[3]), self.key], axis=2),
            value=jnp.concatenate([older.value, self.value], axis=2),
            position=self.position,
            cursor=self.cursor,
        )

    def rows_at(self, slots: Array) -> tuple[Array, Array]:
        return self.resident().rows_at(slots)

    def keys_between(self, slots: Array) -> Array:
        return self.keys_at(slots)

    def packed_bytes(self) -> tuple[Array, int]:
        """Count the bytes of a step that packing saves, float32 [B], and the bytes of the channel indices."""
        older = self.older
        packed = jnp.sum(older.position >= 0, axis=(1, 2), dtype=jnp.float32)
        spared = (older.value.shape[3] - older.key.shape[3]) * older.key.dtype.itemsize
        listed = 0 if older.channels is None else math.prod(older.channels.shape[1:]) * older.channels.dtype.itemsize
        return packed * spared, listed

    def copied(self) -> Array:
        return self.cursor


def pick_channels(query: Array, older: Older) -> Array:
    """Select the channels of a query [B, H, ..., D] that the packed keys kept, padded with zeros: [B, H, ..., E].

    Of biased keys these are all channels, and a one for each half of the bias.
    """
    if older.channels is None:
        picked = jnp.pad(query, (*((0, 0),) * (query.ndim - 1), (0, 2)), constant_values=1)
        return jnp.pad(picked, (*((0, 0),) * (query.ndim - 1), (0, older.key.shape[3] - picked.shape[-1])))
    picked = jnp.take_along_axis(query, jnp.expand_dims(older.channels, range(2, query.ndim - 1)), axis=-1)
    return jnp.pad(picked, (*((0, 0),) * (query.ndim - 1), (0, older.key.shape[3] - picked.shape[-1])))


def widened(older: Older, dim: int) -> Array:
    """Widen packed keys to [B, H, K, D]; dropped channels are 0, and a bias is left out."""
    key, channels = older.key, older.channels
    if channels is None:
        return key[..., :dim]
    here = jnp.arange(dim, dtype=jnp.int32)[None, None, None]
    kept = (channels[..., None] == here).any(axis=2)
    place = jnp.sum(channels[..., None] < here, axis=2, dtype=jnp.int32)  # of a kept channel among the C, which ascend
    place = jnp.where(kept, place, 0)[:, :, None]
    return jnp.where(kept[:, :, None], jnp.take_along_axis(key, place, axis=3), 0)


def thin(cache: LayerCache, channels: Array, whole: Array, most_whole: int, room: int) -> ThinCache:
    """Pack the keys of ``cache``: most tokens keep only some channels.

    Args:
        channels: int32 [B, H, C], ascending.
        whole: bool [B, H, S], tokens whose keys keep all channels.
    """
    slots = max(cache.num_slots - room, 1)
    newer = cache.compact(*compact(cache.valid & whole, max(min(most_whole, slots), 1)), room)
    slot, kept = compact(cache.valid & ~whole, slots)
    dim = cache.key.shape[3]
    wide = min(_width(channels.shape[2], dim), dim)
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


def biased(key: Array, value: Array, bias: Array, position: Array, room: int) -> ThinCache:
    """Store tokens whose logits have a bias, and ``room`` free slots for later tokens without one.

    Args:
        key: [B, H, N, D], rotated.
        value: [B, H, N, D].
        bias: float32 [B, H, N], added to the scaled logits. It is stored in two numbers of the keys' dtype, which are float32
            to within 2^-16 of the bias if they are bfloat16.
        position: int32 [B, H, N], EMPTY for slots to leave empty, which come last in each head.
    """
    held, dim = position >= 0, key.shape[3]
    bias = bias * math.sqrt(dim)  # queries and keys are multiplied before they are scaled
    high = bias.astype(key.dtype)
    low = (bias - high.astype(jnp.float32)).astype(key.dtype)
    key = jnp.concatenate([key, high[..., None], low[..., None]], axis=3)
    key = jnp.pad(key, ((0, 0), (0, 0), (0, 0), (0, _width(dim + 2, dim) - dim - 2)))
    older = Older(
        key=jnp.where(held[..., None], key, 0),
        value=jnp.where(held[..., None], value, 0),
        position=position,
        limit=axes.most(jnp.sum(held, axis=2, dtype=jnp.int32).max(axis=1)),
        channels=None,
    )
    batch, heads, _ = position.shape
    return ThinCache(newer=empty_cache(batch, heads, room, dim, key.dtype), older=older)


def _width(channels: int, dim: int) -> int:
    """Round the channels of a packed key up, for heads of ``dim``."""
    unit = min(_ROW, max(dim // 4, 1))
    return -(-channels // unit) * unit
