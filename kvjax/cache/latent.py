"""The cache of latent attention: one array, whose rows are the keys and the values (`LatentCache`).

In latent attention (MLA) all heads share a key, and a value is the part of the same vector that does not rotate. A model says
so by ``value_is_key`` (`kvjax.protocol.typing.Model`): attention sums the stored keys, and the model reads the channels
that it needs
of the sum. A row of an offloaded cache in host memory is such a key, too. Only ``divided``, and ``offload`` with all keys on
the device, store the keys a second time, as values.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache.storage import LayerCache, next_slots, put_tokens, stored_token
from kvjax.protocol.typing import EMPTY, pytree
from kvjax.selection import kept_positions, kept_rows
from pallas_kernels.formats.quantised import Quantised, numbers_at, stored_like, whole
from pallas_kernels.store.evict_token import evict_token
from pallas_kernels.store.store_token import Stored


@pytree
class LatentCache(LayerCache):
    """Keys of one layer, all on the device, which are the values too.

    Operations get the same array as keys and as values, or the same codes.
    """

    held: Array | Quantised  # [B, H, S, D], in the dtype of the model or as codes
    position: Array  # int32 [B, H, S], absolute token position; EMPTY if the slot holds no token
    cursor: Array  # int32 [B], the slot for the row's next token

    @property
    def codes(self) -> tuple[Quantised, Quantised] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return (self.held, self.held) if isinstance(self.held, Quantised) else None

    @property
    def key(self) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All keys, dequantised: [B, H, S, D] in the dtype of the model."""
        return whole(self.held)

    @property
    def value(self) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The keys."""
        return whole(self.held)

    @property
    def slot_bytes(self) -> int:
        return super().slot_bytes // 2  # a kernel that reads a key as a value finds it where it has just read it

    def append(self, key: Array, value: Array, position: Array, start: Array | int | None = None) -> LatentCache:
        if start is None and key.shape[2] == 1:
            return _after(stored_token(self, key, key, position))
        slot, cursor = next_slots(self, position)

        def put(store: Array, new: Array) -> Array:
            return put_tokens(store, new, slot, start)

        return LatentCache(
            held=jax.tree.map(put, self.held, stored_like(key, self.held)),
            position=put(self.position, jnp.broadcast_to(position[:, None], key.shape[:3])),
            cursor=cursor,
        )

    def append_rotated(
        self, query: Array, key: Array, value: Array, position: Array, inv_freq: Array
    ) -> tuple[Array, LatentCache]:
        stored = stored_token(self, key, key, position, query[..., 0, :], inv_freq)
        return cast("Array", stored.query)[..., None, :], _after(stored)

    def rows_at(self, slots: Array) -> tuple[Array, Array]:
        key = numbers_at(self.held, slots[:, None])
        return key, key

    def compact(self, slots: Array, keep: Array, room: int) -> LatentCache:
        position, cursor = kept_positions(self.position, slots, keep, room)
        held = jax.tree.map(lambda x: kept_rows(x, slots, room), self.held)
        return LatentCache(held=held, position=position, cursor=cursor)

    def evict(self, score: Array | None, **options: Any) -> tuple[LatentCache, Array | None]:
        kept = evict_token(self.held, self.held, self.position, self.cursor, score, **options)
        return LatentCache(held=cast("Any", kept.key), position=kept.position, cursor=kept.cursor), kept.score


def _after(stored: Stored) -> LatentCache:
    """Make the cache of arrays with one more token. What was stored as its value is not read, so no program stores it."""
    return LatentCache(held=stored.key, position=stored.position, cursor=stored.cursor)


def empty_latent(held: Array | Quantised) -> LatentCache:
    """Make an empty cache whose keys are in ``held`` [B, H, S, D]."""
    shape = held.shape[:3]
    return LatentCache(held=held, position=jnp.full(shape, EMPTY, jnp.int32), cursor=jnp.zeros(shape[:1], jnp.int32))
