"""Caches whose rows are in pinned host memory, in the dtype of the model or as codes (``kv_dtype``).

This file has the storage (`OffloadedLayerCache`, with the interface of `LayerCache`), and says when decoding writes new
tokens to host memory (`steps_between_syncs`, `sync`). A method says which rows nearly every step reads (`Near`); these rows
have copies on the device. A method whose steps read all keys, or keys besides attention, leaves the keys on the device: then
only the values are in host memory.

A row of codes in host memory has the codes of key and value, at most 2 * D bytes, and the scales of all slots are on the
device. A row costs one look-up on the bus, whatever its bytes (docs/offload.md): scales in an array of their own in host
memory would double the look-ups. Scales inside the rows would make rows 4 bytes longer or more, which begin in the middle of
a memory line and take one line more. On the device the scales take 4 bytes for each token and KV head, as many as the
position, and 1.6 % of the row's bytes in 8 bits at D = 128; with values in 4 bits they take 10 bytes. And a kernel finds the
scales at the slot, wherever it reads the row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache.divided import empty_part
from kvjax.cache.latent import LatentCache
from kvjax.cache.quantised import empty_codes, empty_resident, resident_of
from kvjax.cache.storage import LayerCache, LayerSpec, LayerStorage, next_slots, put_tokens, stored_token
from kvjax.protocol.typing import EMPTY, not_none, pytree, static
from pallas_kernels.formats.quantised import Quantised, numbers, stored_like, vectors, whole, with_vectors
from pallas_kernels.host import (
    Rows,
    copied_slots,
    copy_row,
    has_copy,
    put_chunk,
    put_rows,
    take_rows,
    take_window,
    to_device,
    to_host,
)
from pallas_kernels.store.store_token import Stored

_SYNC_EVERY = 32  # the most decode steps whose tokens are written to host memory together


class Near(NamedTuple):
    """Slots of an offloaded cache that have copies on the device, because nearly every step reads them."""

    first: int = 0  # first slots
    newest: int = 64  # newest tokens, at least 1


@pytree
class OffloadedLayerCache(LayerStorage):
    """Keys and values of one layer in pinned host memory, with copies of some on the device (`pallas_kernels.host.Rows`).

    During prefill there are no copies (R = 0). A decode step writes its token only to the copies; `sync` writes it to host
    memory later. With a ``kv_dtype`` host memory and the copies hold codes, and the scales of all slots are on the device.
    """

    near_key: Array | Quantised  # [B, H, R, D], copies; [B, H, S, D] if only values are in host memory
    # [B, H, R, D], copies; if they are codes, `scale` has all slots, [B, H, S] or [B, H, S, 4]. With `once`: [B, H, 0, D].
    near_value: Array | Quantised
    position: Array  # int32 [B, H, S], absolute token position; EMPTY if the slot holds no token
    cursor: Array  # int32 [B], the slot for the row's next token
    # In host memory: [B, H, S, 2 * D], key and value side by side; or only values, or keys that are the values: [B, H, S, D];
    # or codes.
    host: Array
    sinks: int = static("first slots that have copies; the other copies are a ring of the newest tokens", default=0)
    once: bool = static("whether a row is the key and the value, see `kvjax.cache.latent`", default=False)

    @property
    def codes(self) -> tuple[Quantised, Quantised] | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        return cast("Any", self.stored) if isinstance(self.near_key, Quantised) else None

    @property
    def stored(self) -> tuple[Array | Quantised, Array | Quantised]:
        return self.near_key, self._values

    @property
    def _values(self) -> Array | Quantised:
        """The copies of values on the device, which are the copies of keys if a row is both."""
        return self.near_key if self.once else self.near_value

    @property
    def key(self) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """`near_key`, dequantised, in the dtype of the model."""
        return self._read(self.near_key)

    @property
    def value(self) -> Array:  # pyright: ignore[reportIncompatibleVariableOverride]
        """`near_value`, dequantised, in the dtype of the model."""
        return self._read(self._values)

    def _read(self, near: Array | Quantised) -> Array:
        if near.shape[2] == self.num_slots:
            return whole(near)
        return numbers(near, vectors(near), copied_slots(self.cursor, self.sinks, near.shape[2])[:, None])

    @property
    def rows(self) -> Rows:
        return Rows(host=self.host, newest=self.cursor, sinks=self.sinks)

    @property
    def ring(self) -> int:
        """The number of newest tokens that have copies."""
        return self._values.shape[2] - self.sinks

    @property
    def _keys_stay(self) -> bool:
        """Whether all keys are on the device, and only values in host memory."""
        return not self.once and self.host.shape[3] == _width(self.near_value)

    @property
    def slot_bytes(self) -> int:
        return super().slot_bytes // (1 + self.once)

    def append(self, key: Array, value: Array, position: Array, start: Array | int | None = None) -> OffloadedLayerCache:
        if start is None and key.shape[2] == 1:
            return self._after(stored_token(self, key, value, position))
        slot, cursor = next_slots(self, position)
        new_key, new_value = stored_like(key, self.near_key), stored_like(value, self.near_value)

        def put(store: Array, new: Array) -> Array:
            return put_tokens(store, new, slot, start)

        def put_near(
            near: Array | Quantised, new: Array | Quantised, put_vectors: Callable[[Array, Array], Array]
        ) -> Array | Quantised:
            made = put_vectors(vectors(near), vectors(new))
            if not isinstance(near, Quantised) or not isinstance(new, Quantised):
                return made
            return dataclasses.replace(near, codes=made, scale=put(near.scale, new.scale))

        def put_copies(store: Array, new: Array) -> Array:
            rows = store.shape[2]
            if not rows:  # the prompt is not finished
                return store
            # If several tokens share a row of the ring, only the last is written; the rest get a row that does not exist.
            stays = (slot < self.num_slots) & ((slot < self.sinks) | (slot >= cursor[:, None] - (rows - self.sinks)))
            return put_tokens(store, new, jnp.where(stays, copy_row(slot, self.sinks, rows), rows), None)

        new = vectors(new_value) if self._keys_stay else _row(new_key, new_value, self.once)
        return OffloadedLayerCache(
            near_key=put_near(self.near_key, new_key, put if self._keys_stay else put_copies),
            near_value=self.near_value if self.once else put_near(self.near_value, new_value, put_copies),
            position=put(self.position, jnp.broadcast_to(position[:, None], key.shape[:3])),
            cursor=cursor,
            host=(
                put_rows(self.host, new, self.cursor, cursor - self.cursor)
                if start is None
                else put_chunk(self.host, new, start)
            ),
            sinks=self.sinks,
            once=self.once,
        )

    def append_rotated(
        self, query: Array, key: Array, value: Array, position: Array, inv_freq: Array
    ) -> tuple[Array, OffloadedLayerCache]:
        stored = stored_token(self, key, value, position, query[..., 0, :], inv_freq)
        return not_none("query", stored.query)[..., None, :], self._after(stored)

    def _after(self, stored: Stored) -> OffloadedLayerCache:
        return OffloadedLayerCache(
            near_key=stored.key,
            near_value=self.near_value if self.once else stored.value,
            position=stored.position,
            cursor=stored.cursor,
            host=self.host,
            sinks=self.sinks,
            once=self.once,
        )

    def resident(self) -> LayerCache:
        key, value = self.near_key, self.near_value
        if not self._keys_stay:
            key = with_vectors(key, self._stage(vectors(key), 0))
        if self.once:
            return LatentCache(held=key, position=self.position, cursor=self.cursor)
        value = with_vectors(value, self._stage(vectors(value), 0 if self._keys_stay else _width(key)))
        return resident_of(key, value, self.position, self.cursor)

    def _stage(self, copies: Array, begin: int) -> Array:
        """Copy columns ``begin`` to ``begin + D`` of all rows to the device, with the newest tokens from ``copies``."""
        shape = (*copies.shape[:2], self.num_slots, copies.shape[3])
        store = to_device(lax.dynamic_slice(self.host, (0, 0, 0, begin), shape, allow_negative_indices=False))
        if not copies.shape[2]:  # the prompt is not finished, and host memory has all tokens
            return store
        slot = self.cursor[:, None] - jnp.arange(1, self.ring + 1, dtype=jnp.int32)[None]
        newest = take_rows(copies, copy_row(jnp.maximum(slot, 0), self.sinks, copies.shape[2])[:, None])
        slot = jnp.where(slot >= 0, slot, self.num_slots)  # a slot that does not exist is dropped
        return store.at[jnp.arange(len(slot))[:, None], :, slot].set(newest.swapaxes(1, 2), mode="drop")

    def rows_at(self, slots: Array) -> tuple[Array, Array]:
        key, value = (numbers(x, self._copies(x, slots), slots[:, None]) for x in self.stored)
        return key, value

    def _copies(self, near: Array | Quantised, slots: Array) -> Array:
        """Read the copies of keys or values, or of their codes, [B, H, K, D] at ``slots`` int32 [B, K]."""
        return take_rows(vectors(near), copy_row(slots, self.sinks, near.shape[2])[:, None])

    def keys_between(self, slots: Array) -> Array:
        size = slots.shape[1]
        if self._keys_stay or size > min(self.ring, self.num_slots):
            return self.resident().keys_at(slots)
        copied = has_copy(slots, self.cursor[:, None], self.sinks, self.near_key.shape[2])[:, None, :, None]
        away = take_window(self.host, slots[:, 0], size)[..., : _width(self.near_key)]
        return numbers(self.near_key, jnp.where(copied, self._copies(self.near_key, slots), away), slots[:, None])

    def copied(self) -> Array:
        return jnp.minimum(self.cursor, self._values.shape[2])

    def sync(self, tokens: int) -> OffloadedLayerCache:
        """Write the ``tokens`` newest tokens (at most `ring`) to host memory."""
        tokens = min(tokens, self.ring)
        start = jnp.maximum(self.cursor - tokens, 0)
        slot = start[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        row = copy_row(slot, self.sinks, self._values.shape[2])[:, None]
        value = take_rows(vectors(self._values), row)
        new = value if self._keys_stay else _row(take_rows(vectors(self.near_key), row), value, self.once)
        host = put_rows(self.host, new, start, jnp.minimum(self.cursor, tokens))
        return dataclasses.replace(self, host=host)

    def reread(self, count: Array, most: int) -> OffloadedLayerCache:
        """Copy rows from host memory to the ring, where ``count`` int32 [B] tokens behind the cursor have replaced them.

        Host memory has these rows; ``most`` is the largest ``count``.
        """
        order, rows = jnp.arange(most, dtype=jnp.int32)[None], self._values.shape[2]
        slot = self.cursor[:, None] + order
        older, start = slot - self.ring, jnp.maximum(self.cursor - self.ring, 0)
        lost = (order < count[:, None]) & (older >= self.sinks)
        row = jnp.where(lost, copy_row(slot, self.sinks, rows), rows)  # a row that does not exist is dropped
        away = take_window(self.host, start, most)
        away = jnp.take_along_axis(away, jnp.maximum(older - start[:, None], 0)[:, None, :, None], axis=2)

        def put(near: Array | Quantised, new: Array) -> Array | Quantised:
            return with_vectors(near, put_tokens(vectors(near), new, row, None))

        key = self.near_key if self._keys_stay else put(self.near_key, away[..., : _width(self.near_key)])
        value = self.near_value if self.once else put(self.near_value, away[..., -_width(self.near_value) :])
        return dataclasses.replace(self, near_key=key, near_value=value)


def empty_storage(spec: LayerSpec, slots: int, values_only: bool = False) -> LayerCache | OffloadedLayerCache:
    """Make an empty cache of ``slots`` slots, offloaded if the layer is. With ``values_only`` keys stay on the device."""
    shape = (spec.batch, spec.num_kv_heads, slots, spec.head_dim)
    if spec.parts > 1 and spec.kv_dtype is None:
        return empty_part(spec, slots)
    if not spec.offloaded:
        return empty_resident(spec, slots, spec.parts)
    once = spec.value_is_key and not values_only

    def near(rows: int, which: int) -> Array | Quantised:
        if spec.kv_dtype is None:
            return jnp.zeros((*shape[:2], rows, spec.head_dim), spec.dtype)
        return dataclasses.replace(empty_codes(spec, rows, which), scale=empty_codes(spec, slots, which).scale)

    key, value = near(slots if values_only else 0, 0), near(0, 1)
    width = _width(key) * (not values_only) + _width(value) * (not once)
    return OffloadedLayerCache(
        near_key=key,
        near_value=jnp.zeros((*shape[:2], 0, spec.head_dim), spec.dtype) if once else value,
        position=jnp.full(shape[:3], EMPTY, jnp.int32),
        cursor=jnp.zeros((spec.batch,), jnp.int32),
        host=to_host(jnp.zeros((*shape[:3], width), vectors(value).dtype)),
        once=once,
    )


def offload(cache: LayerCache, near: Near, host: Array | None = None, values_only: bool = False) -> OffloadedLayerCache:
    """Move the rows of a cache to host memory, and copy some rows to the device.

    Args:
        host: the rows if they are in host memory already, see `OffloadedLayerCache`; None moves them there.
    """
    slot = copied_slots(cache.cursor, near.first, near.first + near.newest)[:, None]
    key, value = cache.stored
    once = isinstance(cache, LatentCache)
    if host is None:
        host = to_host(vectors(value) if values_only else _row(key, value, once))

    def copies(x: Array | Quantised) -> Array | Quantised:
        return with_vectors(x, take_rows(vectors(x), slot))

    return OffloadedLayerCache(
        near_key=key if values_only else copies(key),
        near_value=jnp.zeros((*key.shape[:2], 0, key.shape[3]), key.dtype) if once else copies(value),
        position=cache.position,
        cursor=cache.cursor,
        host=host,
        sinks=near.first,
        once=once,
    )


def _width(x: Array | Quantised) -> int:
    """Return the numbers of a row, or the bytes of its codes."""
    return vectors(x).shape[3]


def _row(key: Array | Quantised, value: Array | Quantised, once: bool) -> Array:
    """Join key and value of each slot, or their codes: [B, H, S, 2 * D], or fewer bytes. With ``once`` take only the key."""
    if once:
        return vectors(key)
    return jnp.concatenate([vectors(key), vectors(value)], axis=3)


def _is_offloaded_cache(x: Any) -> bool:
    return isinstance(x, OffloadedLayerCache)


def sync(layers: tuple[Any, ...], tokens: int) -> tuple[Any, ...]:
    """Write the ``tokens`` newest tokens of each row to host memory in all layers; see `OffloadedLayerCache.sync`."""
    return jax.tree.map(lambda x: x.sync(tokens) if _is_offloaded_cache(x) else x, layers, is_leaf=_is_offloaded_cache)


def steps_between_syncs(layers: tuple[Any, ...], steps: int) -> int | None:
    """Return after how many of ``steps`` decode steps host memory must be written; None if no layer is offloaded.

    Host memory is written in slices, so new tokens wait in the copies on the device and cross the bus together.
    """
    leaves = jax.tree.leaves(layers, is_leaf=_is_offloaded_cache)
    rings = [x.ring for x in leaves if _is_offloaded_cache(x)]
    return min(_SYNC_EVERY, steps, *rings) if rings else None
