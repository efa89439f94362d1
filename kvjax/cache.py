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
from pallas_kernels.store_token import store_token


@pytree
class LayerCache:
    """Keys and values of one layer; every method's exact storage."""

    key: Array  # [B, H, S, D], in the dtype of the model
    value: Array  # [B, H, S, D]
    position: Array  # int32 [B, H, S], absolute token position, EMPTY where the slot holds nothing
    cursor: Array  # int32 [B], the slot the row's next token goes to

    @property
    def num_slots(self) -> int:
        """Allocated slots S."""
        return self.key.shape[2]

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
                key=lax.dynamic_update_slice_in_dim(self.key, key, start, 2),
                value=lax.dynamic_update_slice_in_dim(self.value, value, start, 2),
                position=lax.dynamic_update_slice_in_dim(self.position, here, start, 2),
                cursor=cursor,
            )
        slot = jnp.where(
            position >= 0, self.cursor[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None], self.num_slots
        )
        row = jnp.arange(batch)[:, None]

        def put(store: Array, new: Array) -> Array:  # new [B, T, H, ...]; the slot S does not exist and is dropped
            return store.at[row, :, slot].set(new, mode="drop")

        return LayerCache(
            key=put(self.key, key.swapaxes(1, 2)),
            value=put(self.value, value.swapaxes(1, 2)),
            position=put(self.position, here.swapaxes(1, 2)),
            cursor=cursor,
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
        """One token per row: see `store_token`."""
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
        )
        cache = LayerCache(key=stored.key, value=stored.value, position=stored.position, cursor=stored.cursor)
        return stored.query, cache

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


def empty_layer(batch: int, heads: int, slots: int, head_dim: int, dtype: Any) -> LayerCache:
    """A layer cache that holds nothing."""
    shape = (batch, heads, slots, head_dim)
    return LayerCache(
        key=jnp.zeros(shape, dtype),
        value=jnp.zeros(shape, dtype),
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

    def rows(tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0) if copies > 1 else jnp.copy(x), tree)

    return Cache(
        layers=rows(cache.layers),
        shared=rows(cache.shared),
        method=jax.tree.map(jnp.copy, method),
        length=rows(cache.length),
        logits=rows(cache.logits),
        model=cache.model,
        weights=cache.weights,
    )
