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

from kvjax.typing import EMPTY, Model, pytree, static
from pallas_kernels.host import copy_row, on_host, put_chunk, put_rows, take_rows, to_device, to_host
from pallas_kernels.store_token import store_token


@pytree
class Copies:
    """On the device: copies of the rows that nearly every step reads, of a cache whose rows are in host memory.

    Those of the first ``sinks`` slots, then a ring of the newest; the newest may not have been written to the host yet.
    """

    key: Array | None  # [B, H, R, D], see `pallas_kernels.host.copy_row`; None where keys are on the device
    value: Array  # [B, H, R, D]
    sinks: int = static()  # first slots, all copied

    @property
    def recent(self) -> int:
        """Newest tokens there is room for."""
        return self.value.shape[2] - self.sinks


@pytree
class LayerCache:
    """Keys and values of one layer; every method's exact storage."""

    key: Array  # [B, H, S, D], in the dtype of the model; in device memory or in pinned host memory, as is
    value: Array  # [B, H, S, D]
    position: Array  # int32 [B, H, S], absolute token position, EMPTY where the slot holds nothing
    cursor: Array  # int32 [B], the slot the row's next token goes to
    copies: Copies | None = None  # of rows in host memory, once the prompt is read

    @property
    def num_slots(self) -> int:
        """Allocated slots S."""
        return self.key.shape[2]

    @property
    def offloaded(self) -> bool:
        """Whether values, and keys or not, are in host memory."""
        return on_host(self.value)

    @property
    def near_key(self) -> Array:
        """Where a decode step finds the key it has just stored: [B, H, S, D] by slot, or copies laid out by `near_sinks`."""
        return self.key if self.copies is None or self.copies.key is None else self.copies.key

    @property
    def near_sinks(self) -> int | None:
        """``sinks`` of `near_key` for the kernels that read it; None where it has a row for every slot."""
        return None if self.copies is None or self.copies.key is None else self.copies.sinks

    def staged(self) -> LayerCache:
        """The same with all rows on the device: itself, or for as long as it is used a copy of the whole layer."""
        if not self.offloaded:
            return self
        near = self.copies or Copies(key=None, value=None, sinks=0)

        def stage(store: Array, copy: Array | None) -> Array:
            store = to_device(store)
            if copy is None:
                return store
            rows = copy.shape[2]
            slot = self.cursor[:, None] - jnp.arange(1, rows - near.sinks + 1, dtype=jnp.int32)[None]
            newest = take_rows(copy, copy_row(jnp.maximum(slot, 0), near.sinks, rows)[:, None])
            at = jnp.where(slot >= 0, slot, self.num_slots)  # a slot that does not exist is dropped
            return store.at[jnp.arange(len(slot))[:, None], :, at].set(newest.swapaxes(1, 2), mode="drop")

        return LayerCache(
            key=stage(self.key, near.key),
            value=stage(self.value, near.value),
            position=self.position,
            cursor=self.cursor,
        )

    def offload(self, sinks: int, recent: int, hosted: LayerCache | None = None) -> LayerCache:
        """The same with its rows in host memory, and copies of the first ``sinks`` and the ``recent`` newest on the device.

        ``hosted``: a cache whose rows these are already, so that none is moved.
        """
        slots = self.num_slots
        sinks = max(min(sinks, slots - 1), 0)
        copies = min(recent, slots - sinks) + sinks
        row = jnp.arange(copies, dtype=jnp.int32)[None]
        ring = copies - sinks
        # The newest slot below the cursor that has this row; its own number where the ring is not yet full.
        laps = jnp.maximum(self.cursor[:, None] - 1 - row, 0) // ring
        slot = jnp.where(row < sinks, row, row + laps * ring)[:, None]
        hosted = hosted or LayerCache(
            key=to_host(self.key), value=to_host(self.value), position=self.position, cursor=self.cursor
        )
        keys = take_rows(self.key, slot) if on_host(hosted.key) else None
        return LayerCache(
            key=hosted.key,
            value=hosted.value,
            position=self.position,
            cursor=self.cursor,
            copies=Copies(key=keys, value=take_rows(self.value, slot), sinks=sinks),
        )

    def settled(self, tokens: int) -> LayerCache:
        """Host memory brought up to date with the ``tokens`` newest slots, which decode steps write to the copies only."""
        near = self.copies
        if near is None:
            return self
        tokens = min(tokens, near.recent, self.num_slots)
        start = jnp.maximum(self.cursor - tokens, 0)
        slot = start[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
        row = copy_row(slot, near.sinks, near.value.shape[2])[:, None]
        count = jnp.minimum(self.cursor, tokens)

        def write(host: Array, copy: Array | None) -> Array:
            return put_rows(host, take_rows(copy, row), start, count) if on_host(host) else host

        return LayerCache(
            key=write(self.key, near.key),
            value=write(self.value, near.value),
            position=self.position,
            cursor=self.cursor,
            copies=near,
        )

    @property
    def valid(self) -> Array:
        """Whether each slot holds a token: bool [B, H, S]."""
        return self.position >= 0

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
        if start is not None:
            return LayerCache(
                key=put_chunk(self.key, key, start),
                value=put_chunk(self.value, value, start),
                position=lax.dynamic_update_slice_in_dim(self.position, here, start, 2),
                cursor=cursor,
            )
        slot = jnp.where(
            position >= 0, self.cursor[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None], self.num_slots
        )
        row = jnp.arange(batch)[:, None]

        def put(store: Array, new: Array) -> Array:  # the slot S does not exist and is dropped
            if on_host(store):
                return put_rows(store, new, self.cursor, cursor - self.cursor)
            return store.at[row, :, slot].set(new.swapaxes(1, 2), mode="drop")

        def follow(copy: Array | None, new: Array) -> Array | None:
            if copy is None:
                return None
            # Of tokens that share a row the last stays; written in this order, a slot that does not exist is dropped.
            rows, sinks = copy.shape[2], self.copies.sinks
            gone = (slot >= sinks) & (slot < cursor[:, None] - (rows - sinks))
            at = jnp.where((slot < self.num_slots) & ~gone, copy_row(slot, sinks, rows), rows)
            return copy.at[row, :, at].set(new.swapaxes(1, 2), mode="drop")

        near = self.copies
        return LayerCache(
            key=put(self.key, key),
            value=put(self.value, value),
            position=put(self.position, here),
            cursor=cursor,
            copies=near and Copies(key=follow(near.key, key), value=follow(near.value, value), sinks=near.sinks),
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
        """One token per row: see `store_token`. An offloaded cache stores it in its copies, see `settled`."""
        near = self.copies
        stored = store_token(
            key[:, :, 0],
            value[:, :, 0],
            position[:, 0],
            cache_key=self.near_key,
            cache_value=self.value if near is None else near.value,
            cache_position=self.position,
            cursor=self.cursor,
            query=query,
            inv_freq=inv_freq,
            sinks=None if near is None else near.sinks,
        )
        at = {"position": stored.position, "cursor": stored.cursor}
        if near is None:
            return stored.query, LayerCache(key=stored.key, value=stored.value, **at)
        keys = {"key": stored.key} if near.key is None else {"key": self.key}
        copies = Copies(key=None if near.key is None else stored.key, value=stored.value, sinks=near.sinks)
        return stored.query, LayerCache(**keys, value=self.value, copies=copies, **at)

    def take(self, slots: Array, keep: Array, room: int) -> LayerCache:
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

    def replace_newest(self, slot: Array, when: Array) -> LayerCache:
        """Online eviction: the newest token takes the place of ``slot`` int32 [B, H] in rows where ``when`` bool [B].

        Bounded storage stays dense without shifting it: one row per head is copied, the freed last slot is written next.
        """
        last = jnp.maximum(self.cursor - 1, 0)
        source = jnp.broadcast_to(last[:, None], slot.shape)
        target = jnp.where(when[:, None], slot, source)
        b, h = jnp.arange(slot.shape[0])[:, None], jnp.arange(slot.shape[1])[None]
        position = self.position.at[b, h, target].set(self.position[b, h, source])
        freed = jnp.where(when[:, None], EMPTY, self.position[b, h, source])
        return LayerCache(
            key=self.key.at[b, h, target].set(self.key[b, h, source]),
            value=self.value.at[b, h, target].set(self.value[b, h, source]),
            position=position.at[b, h, source].set(freed),
            cursor=self.cursor - when.astype(jnp.int32),
        )


def empty_layer(
    batch: int, heads: int, slots: int, head_dim: int, dtype: Any, hosted: tuple[str, ...] = ()
) -> LayerCache:
    """A layer cache that holds nothing; ``hosted`` names those of "key" and "value" that are in host memory."""
    shape = (batch, heads, slots, head_dim)
    rows = {name: jnp.zeros(shape, dtype) for name in ("key", "value")}
    return LayerCache(
        **{name: to_host(x) if name in hosted else x for name, x in rows.items()},
        position=jnp.full(shape[:3], EMPTY, jnp.int32),
        cursor=jnp.zeros((batch,), jnp.int32),
    )


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


def fork(cache: Cache, copies: int = 1) -> Cache:
    """An independent copy of ``cache`` with every row repeated ``copies`` times (row b becomes rows b*copies ...).

    Prefill a context once, fork it, and ask each copy another question with `extend`; since `extend` and `generate`
    donate (consume) their cache, fork first whatever should be used again.
    """
    if copies < 1:
        raise ValueError(f"copies must be at least 1, got {copies}")
    method = cache.method

    def repeat(x: Array) -> Array:
        if copies == 1:
            return jnp.copy(x)
        repeated = jnp.repeat(to_device(x), copies, axis=0)
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
