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
        here = jnp.broadcast_to(position[:, None], (batch, heads, tokens))
        cursor = self.cursor + jnp.sum(position >= 0, axis=1, dtype=jnp.int32)
        if start is None and batch == tokens == 1:
            # A clamped in-place write; the old row is put back where the token is padding.
            start = jnp.minimum(self.cursor[0], self.num_slots - 1)
            old = (
                _slice(self.key, start),
                _slice(self.value, start),
                lax.dynamic_slice_in_dim(self.position, start, 1, 2),
            )
            fits = (position[0, 0] >= 0) & (self.cursor[0] < self.num_slots)
            key, value, here = (jnp.where(fits, new, was) for new, was in zip((key, value, here), old, strict=True))
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


def _slice(store: Array, start: Array) -> Array:
    return lax.dynamic_slice_in_dim(store, start, 1, 2)


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
