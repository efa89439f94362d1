"""One layer's key/value storage, and the cache of a whole model.

A slot holds something iff its ``position >= 0``; evicted, padded and not-yet-written slots are the same thing, per head.
Tokens are stored in the order they arrive, from slot 0 on, with **one cursor per row**: a row of a ragged batch occupies
exactly the slots it would occupy alone, so pages, pooling windows and ties fall the same way and the row generates the
same tokens.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.typing import EMPTY, Model, positive_int, pytree, static
from pallas_kernels.evict_token import evict_token
from pallas_kernels.host import copy_row, on_host, put_chunk, put_rows, take_rows, to_device, to_host
from pallas_kernels.store_token import store_token


@pytree
class Host:
    """Rows of all slots in pinned host memory; decode steps leave their tokens on the device until they are `settled`."""

    rows: Array  # [B, H, S, 2 * D], key and value side by side: one look-up of a page for both; or values [B, H, S, D]
    sinks: int = static(0)  # first slots of which the device has copies; those of the newest are a ring behind them


@pytree
class LayerCache:
    """Keys and values of one layer; every method's exact storage."""

    key: Array  # [B, H, S, D], in the dtype of the model; offloaded (`host`), rows of near slots only [B, H, R, D]
    value: Array  # likewise
    position: Array  # int32 [B, H, S], absolute token position, EMPTY where the slot holds nothing
    cursor: Array  # int32 [B], the slot the row's next token goes to
    host: Host | None = None  # offloaded: where the rows of all slots are

    @property
    def num_slots(self) -> int:
        """Allocated slots S."""
        return self.position.shape[2]

    @property
    def valid(self) -> Array:
        """Whether each slot holds a token: bool [B, H, S]."""
        return self.position >= 0

    @property
    def near_sinks(self) -> int | None:
        """``sinks`` for kernels that read or write `key`, see `pallas_kernels.host.copy_row`; None if it has all slots."""
        return None if self.host is None or self._own_keys else self.host.sinks

    @property
    def near(self) -> int:
        """Newest tokens of which an offloaded cache has copies on the device."""
        return self.value.shape[2] - self.host.sinks

    def near_keys(self, slots: Array) -> Array:
        """Keys [B, H, K, D] at ``slots`` int32 [B, K], each of which an offloaded cache has near: the newest, the first."""
        near = self.host is not None and not self._own_keys
        return take_rows(self.key, (copy_row(slots, self.host.sinks, self.key.shape[2]) if near else slots)[:, None])

    @property
    def _own_keys(self) -> bool:
        return self.host is not None and self.host.rows.shape[3] == self.key.shape[3]

    def staged(self) -> LayerCache:
        """The same with all rows on the device: itself, or for as long as it is used a copy of the whole layer."""
        if self.host is None:
            return self
        dim, rows = self.key.shape[3], self.value.shape[2]

        def stage(near: Array, begin: int) -> Array:
            shape = (*near.shape[:2], self.num_slots, dim)
            at = (0, 0, 0, begin)
            store = to_device(lax.dynamic_slice(self.host.rows, at, shape, allow_negative_indices=False))
            if not rows:
                return store
            slot = self.cursor[:, None] - jnp.arange(1, self.near + 1, dtype=jnp.int32)[None]
            newest = take_rows(near, copy_row(jnp.maximum(slot, 0), self.host.sinks, rows)[:, None])
            slot = jnp.where(slot >= 0, slot, self.num_slots)  # a slot that does not exist is dropped
            return store.at[jnp.arange(len(slot))[:, None], :, slot].set(newest.swapaxes(1, 2), mode="drop")

        return LayerCache(
            key=self.key if self._own_keys else stage(self.key, 0),
            value=stage(self.value, 0 if self._own_keys else dim),
            position=self.position,
            cursor=self.cursor,
        )

    def offload(self, sinks: int, recent: int, host: Host | None = None, values_only: bool = False) -> LayerCache:
        """The same with its rows in host memory, and those of the first ``sinks`` and the ``recent`` newest near.

        Args:
            sinks: first slots.
            recent: newest tokens.
            host: where the rows are already, so that none is moved.
            values_only: keys stay on the device.
        """
        row = jnp.arange(sinks + recent, dtype=jnp.int32)[None]
        # The newest slot below the cursor that has this row; its own number where the ring is not yet full.
        laps = jnp.maximum(self.cursor[:, None] - 1 - row, 0) // recent
        slot = jnp.where(row < sinks, row, row + laps * recent)[:, None]
        if host is None:
            host = Host(rows=to_host(self.value if values_only else _beside(self.key, self.value)), sinks=sinks)
        return LayerCache(
            key=self.key if values_only else take_rows(self.key, slot),
            value=take_rows(self.value, slot),
            position=self.position,
            cursor=self.cursor,
            host=Host(rows=host.rows, sinks=sinks),
        )

    def settled(self, tokens: int) -> LayerCache:
        """Host memory brought up to date with the ``tokens`` newest slots, at most `near`."""
        if self.host is None:
            return self
        tokens = min(tokens, self.near)
        start = jnp.maximum(self.cursor - tokens, 0)
        slot = start[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        row = copy_row(slot, self.host.sinks, self.value.shape[2])[:, None]
        new = (
            take_rows(self.value, row)
            if self._own_keys
            else _beside(*(take_rows(x, row) for x in (self.key, self.value)))
        )
        rows = put_rows(self.host.rows, new, start, jnp.minimum(self.cursor, tokens))
        return LayerCache(
            key=self.key,
            value=self.value,
            position=self.position,
            cursor=self.cursor,
            host=Host(rows=rows, sinks=self.host.sinks),
        )

    def append(self, key: Array, value: Array, position: Array, start: Array | None = None) -> LayerCache:
        """Store ``T`` tokens per row.

        Args:
            key: [B, H, T, D].
            value: [B, H, T, D].
            position: int32 [B, T]; tokens at EMPTY are padding (only behind the real ones) and do not move the cursor.
            start: first slot, when it is the same for every row (prompt chunks): a contiguous write in place. None
                writes each row at its own cursor, and padding nowhere.
        """
        batch, heads, tokens, _ = key.shape
        if start is None and tokens == 1:
            return self._store(key, value, position)[1]
        here = jnp.broadcast_to(position[:, None], (batch, heads, tokens))
        cursor = self.cursor + jnp.sum(position >= 0, axis=1, dtype=jnp.int32)
        slot = jnp.where(
            position >= 0, self.cursor[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None], self.num_slots
        )
        row = jnp.arange(batch)[:, None]

        def put(store: Array, new: Array) -> Array:  # the slot S does not exist and is dropped
            if start is not None:
                return lax.dynamic_update_slice_in_dim(store, new, start, 2)
            return store.at[row, :, slot].set(new.swapaxes(1, 2), mode="drop")

        def put_near(store: Array, new: Array) -> Array:
            rows = store.shape[2]
            if not rows:  # the prompt is not finished
                return store
            sinks = self.host.sinks
            # Of tokens that share a row of the ring the last one stays; a row that does not exist is dropped.
            stays = (slot < self.num_slots) & ((slot < sinks) | (slot >= cursor[:, None] - (rows - sinks)))
            at = jnp.where(stays, copy_row(slot, sinks, rows), rows)
            return store.at[row, :, at].set(new.swapaxes(1, 2), mode="drop")

        host = self.host
        if host is not None:
            rows = value if self._own_keys else _beside(key, value)
            if start is not None:
                rows = put_chunk(host.rows, rows, start)
            else:
                rows = put_rows(host.rows, rows, self.cursor, cursor - self.cursor)
            host = Host(rows=rows, sinks=host.sinks)
        return LayerCache(
            key=(put if self.host is None or self._own_keys else put_near)(self.key, key),
            value=(put if self.host is None else put_near)(self.value, value),
            position=put(self.position, here),
            cursor=cursor,
            host=host,
        )

    def append_rotated(
        self, query: Array, key: Array, value: Array, position: Array, inv_freq: Array
    ) -> tuple[Array, LayerCache]:
        """Store the token of one decode step, its key rotated, and rotate its query: on a GPU one kernel.

        Args:
            query: [B, H, G, 1, D], before RoPE.
            key: [B, H, 1, D], before RoPE. The storage may have several heads for each: all of them get it.
            value: [B, H, 1, D].
            position: int32 [B, 1]; EMPTY stores nothing.
            inv_freq: float32 [D/2].

        Returns:
            The rotated query, with as many heads as the storage, [B, C, H * G / C, 1, D]; and the cache.
        """
        rotated, cache = self._store(key, value, position, query[..., 0, :], inv_freq)
        return rotated.reshape(len(rotated), self.key.shape[1], -1, 1, rotated.shape[-1]), cache

    def _store(
        self, key: Array, value: Array, position: Array, query: Array | None = None, inv_freq: Array | None = None
    ) -> tuple[Array | None, LayerCache]:
        """One token per row: see `store_token`. Of an offloaded cache only what is near changes, see `settled`."""
        stored = store_token(
            key[:, :, 0],
            value[:, :, 0],
            position[:, 0],
            cache_key=self.key,
            cache_value=self.value,
            cache_position=self.position,
            cursor=self.cursor,
            query=query,
            inv_freq=inv_freq,
            sinks=None if self.host is None else self.host.sinks,
        )
        return stored.query, LayerCache(
            key=stored.key, value=stored.value, position=stored.position, cursor=stored.cursor, host=self.host
        )

    def compact(self, slots: Array, keep: Array, room: int) -> LayerCache:
        """Compact: keep ``slots`` int32 [B, H, K] where ``keep`` bool [B, H, K], then ``room`` free slots.

        Kept slots must come first in every head; the cursor goes behind the longest head of the row.
        """
        grow = ((0, 0), (0, 0), (0, room))
        index = slots[..., None]
        position = jnp.where(keep, jnp.take_along_axis(self.position, slots, axis=2), EMPTY)
        return LayerCache(
            key=jnp.pad(jnp.take_along_axis(self.key, index, axis=2), (*grow, (0, 0))),
            value=jnp.pad(jnp.take_along_axis(self.value, index, axis=2), (*grow, (0, 0))),
            position=jnp.pad(position, grow, constant_values=EMPTY),
            cursor=jnp.sum(position >= 0, axis=2, dtype=jnp.int32).max(axis=1),
        )

    def evict(
        self,
        score: Array | None,
        *,
        budget: Array | int,
        gain: Array | None = None,
        first: int = 0,
        recent: Array | int = 0,
    ) -> tuple[LayerCache, Array | None]:
        """Online eviction (`evict_token`): rows over ``budget`` tokens give one up per head. Also the scores after it."""
        kept = evict_token(
            self.key,
            self.value,
            self.position,
            self.cursor,
            score,
            budget=budget,
            gain=gain,
            first=first,
            recent=recent,
        )
        return LayerCache(key=kept.key, value=kept.value, position=kept.position, cursor=kept.cursor), kept.score


def empty_layer(batch: int, heads: int, slots: int, head_dim: int, dtype: Any, hosted: int = 0) -> LayerCache:
    """A layer cache that holds nothing; ``hosted`` of its two rows per slot are in host memory: the value's, or both."""
    rows = [jnp.zeros((batch, heads, 0 if hosted > at else slots, head_dim), dtype) for at in (1, 0)]
    host = Host(rows=to_host(jnp.zeros((batch, heads, slots, hosted * head_dim), dtype))) if hosted else None
    return LayerCache(
        key=rows[0],
        value=rows[1],
        position=jnp.full((batch, heads, slots), EMPTY, jnp.int32),
        cursor=jnp.zeros((batch,), jnp.int32),
        host=host,
    )


def _beside(key: Array, value: Array) -> Array:
    """Key and value of a slot as one row: [B, H, S, 2 * D]."""
    return jnp.concatenate([key, value], axis=3)


@pytree
class Cache:
    """Everything `generate` needs to go on: a pytree, an argument and a result, never changed in place."""

    layers: tuple[Any, ...]  # per-layer state of the method, one entry per layer; every leaf has axis B first
    shared: Any  # state of the method that all layers read, written once per token
    method: Any  # the method that made the layers
    length: Array  # int32 [B], tokens seen so far = position of the next one
    logits: Array  # float32 [B, V], of the next token
    model: Model = static()  # the model description that made it
    weights: str = static("")  # fingerprint of the parameters' names and shapes, "" if unknown

    @property
    def batch(self) -> int:
        """Rows B."""
        return self.length.shape[0]


def check_alive(cache: Cache) -> None:
    """Refuse what is no cache, and a cache that was consumed."""
    if not isinstance(cache, Cache):
        raise ValueError(f"expected a Cache, as prefill returns it and a Generation has, got {type(cache).__name__}")
    known = isinstance(cache.length, jax.Array) and not isinstance(cache.length, jax.core.Tracer)
    if known and cache.length.is_deleted():
        raise ValueError(
            "this cache was consumed by an earlier generate, stream, extend or decode_step: use the one which that call "
            "returned, or kvjax.fork it before"
        )


def fork(cache: Cache, copies: int = 1) -> Cache:
    """An independent copy of ``cache`` with every row repeated ``copies`` times (row b becomes rows b*copies ...).

    Prefill a context once, fork it, and ask each copy another question with `extend`; since `extend` and `generate`
    donate (consume) their cache, fork first whatever should be used again.
    """
    count = positive_int("copies", copies)
    check_alive(cache)
    method = cache.method

    def repeat(x: Array) -> Array:
        if count == 1:
            return jnp.copy(x)
        repeated = jnp.repeat(to_device(x), count, axis=0)
        return to_host(repeated) if on_host(x) else repeated

    def rows(tree: Any) -> Any:
        return jax.tree.map(repeat, tree)

    return Cache(
        layers=rows(cache.layers),
        shared=rows(cache.shared),
        method=jax.tree.map(jnp.copy, method),
        length=rows(cache.length),
        logits=rows(cache.logits),
        model=cache.model,
        weights=cache.weights,
    )
