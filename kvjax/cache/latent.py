"""The cache of latent attention: one array, whose rows are the keys and the values (`LatentCache`).

In latent attention (MLA) all heads share a key, and a value is the part of the same vector that does not rotate. A model says
so by ``value_is_key`` (`kvjax.protocol.typing.Model`): attention sums the stored keys, and the model reads the channels
that it needs
of the sum. A row of an offloaded cache in host memory is such a key, too. Only ``divided``, and ``offload`` with all keys on
the device, store the keys a second time, as values.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax.cache.storage import LayerCache
from kvjax.protocol.typing import EMPTY, pytree
from pallas_kernels.formats.quantised import Quantised, numbers_at, whole


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

    def holding(self, key: Any, value: Any, position: Array, cursor: Array) -> LatentCache:
        """Make a cache of ``key``. What was stored as the value is not read, so no program stores it."""
        return LatentCache(held=key, position=position, cursor=cursor)

    def append(self, key: Array, value: Array, position: Array, start: Array | int | None = None) -> LatentCache:
        return super().append(key, key, position, start)

    def append_rotated(
        self, query: Array, key: Array, value: Array, position: Array, inv_freq: Array
    ) -> tuple[Array, LatentCache]:
        return super().append_rotated(query, key, key, position, inv_freq)

    def rows_at(self, slots: Array) -> tuple[Array, Array]:
        key = numbers_at(self.held, slots[:, None])
        return key, key


def empty_latent(held: Array | Quantised) -> LatentCache:
    """Make an empty cache whose keys are in ``held`` [B, H, S, D]."""
    shape = held.shape[:3]
    return LatentCache(held=held, position=jnp.full(shape, EMPTY, jnp.int32), cursor=jnp.zeros(shape[:1], jnp.int32))
