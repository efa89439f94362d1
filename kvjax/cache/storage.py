"""The keys and values of one layer.

A slot holds a token if its ``position >= 0``, in each head separately. Evicted slots, padding and slots that were never
written look the same. Tokens are stored in the order they arrive, from slot 0 on, with **one cursor per row**: a row of a
ragged batch uses exactly the slots that it would use alone. So its pages, pooling windows and ties are the same, and it
generates the same tokens.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.protocol.typing import EMPTY, not_none, pytree
from kvjax.rope import rotate
from kvjax.selection import kept_positions, kept_rows, moved_rows
from pallas_kernels import axes
from pallas_kernels.formats.quantised import Quantised, numbers_at, stored_like, vector_bytes, whole
from pallas_kernels.host import Rows, take_between
from pallas_kernels.store.evict_token import evict_token
from pallas_kernels.store.store_token import Stored, store_token


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Static sizes of one layer's storage. Layers with equal specs share compiled code."""

    batch: int
    num_kv_heads: int
    group_size: int  # query heads per KV head
    head_dim: int
    dtype: str
    prompt_slots: int  # padded prompt length in tokens
    max_new_tokens: int  # tokens that may follow the prompt
    offloaded: bool = False  # whether this layer's rows are in host memory, `kvjax.decoding.layers.is_offloaded`
    parts: int = 1  # devices over which the slots of a row are divided, see `kvjax.cache.divided`
    kv_dtype: str | None = None  # of stored keys and values, see `kvjax.cache.quantised.KV_DTYPES`; None means `dtype`
    value_is_key: bool = False  # whether the values are the keys, see `kvjax.cache.latent`


@pytree
class Older:
    """The tokens of a `ThinCache` whose keys have C channels, from slot 0 on in every head; 0 in empty slots.

    Or their keys have all D channels and two more, whose sum is the token's bias: see `kvjax.cache.packed_keys.biased`.
    """

    key: Array  # [B, H, N, E], the C channels, then zeros; see `kvjax.cache.packed_keys`
    value: Array  # [B, H, N, D]
    position: Array  # int32 [B, H, N]
    limit: Array  # int32 [B], the slots of the row's longest head that hold a token
    channels: Array | None  # int32 [B, H, C], ascending; None: all, and a bias


class LayerStorage(abc.ABC):
    """A layer's storage as methods see it.

    It has six forms: `PlainCache` (resident), `OffloadedLayerCache` (rows in host memory, as codes too), `PartCache` (this
    device's slots of each row), `ThinCache` (some channels of older keys), `QuantisedCache` (resident, as codes), and
    `LatentCache` (keys that are the values).
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # every subclass is a dataclass

    key: Array  # [B, H, S, D], in the dtype of the model; if offloaded, the copies on the device [B, H, R, D]
    value: Array  # [B, H, S, D] or [B, H, R, D], like `key`
    position: Array  # int32 [B, H, S], absolute token position; EMPTY if the slot holds no token
    cursor: Array  # int32 [B], the slot for the row's next token, among the slots of all devices
    parts: int = 1  # devices over which the slots of a row are divided
    older: Older | None = None  # the first slots, if their keys have only some channels; `key` and `value` have the rest
    # Keys and values, if they are stored as codes; `key` and `value` are then dequantised where they are used.
    codes: tuple[Quantised, Quantised] | None = None

    @property
    def stored(self) -> tuple[Array | Quantised, Array | Quantised]:
        """Keys and values for operations that read codes too."""
        return (self.key, self.value) if self.codes is None else self.codes

    def read_back(self, key: Array, value: Array) -> tuple[Array, Array]:
        """Round new keys and values [B, H, T, D] to the values that this cache will store."""
        stored = self.stored
        return whole(stored_like(key, stored[0])), whole(stored_like(value, stored[1]))

    @property
    def newest_key(self) -> tuple[Array, Rows | None]:
        """`newest` for operations that read no value."""
        key, _, rows = self.newest
        return key, rows

    @property
    def newest(self) -> tuple[Array, Array, Rows | None]:
        """``key``, ``value`` and ``rows`` for operations that read only the slot before ``here``.

        In a cache of codes they are dequantised copies of this slot, because an operand is written to memory first.
        """
        if self.codes is None:
            return self.key, self.value, self.rows
        key, value = self.rows_at(jnp.maximum(self.here - 1, 0)[:, None])
        # A ring of one copy; `host` is not read.
        return key, value, Rows(host=self.codes[0].codes, newest=self.cursor, sinks=0)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a key and a value, which a step reads to attend to a slot of one head."""
        return sum(map(vector_bytes, self.stored))

    @property
    def slot_bus_bytes(self) -> int:
        """Bytes of `slot_bytes` that cross the bus if the slot has no copy on the device; 0 if the cache is resident."""
        return 0 if self.rows is None else self.rows.host.shape[3] * self.rows.host.dtype.itemsize

    @property
    def num_slots(self) -> int:
        """Allocated slots S, on this device."""
        return self.position.shape[2]

    @property
    def row_slots(self) -> int:
        """Allocated slots of a row, on all devices."""
        return self.num_slots * (axes.size(axes.SLOTS) if self.parts > 1 else 1)

    @property
    def first(self) -> Array | int:
        """The index in the row of this device's first slot, an int32 scalar; 0 if the slots are not divided."""
        return axes.index(axes.SLOTS) * self.num_slots if self.parts > 1 else 0

    @property
    def here(self) -> Array:
        """`cursor` counted from this device's first slot, int32 [B]: below 0 or above S if it is on another device."""
        return self.cursor - self.first if self.parts > 1 else self.cursor

    @property
    def valid(self) -> Array:
        """Whether each slot holds a token: bool [B, H, S]."""
        return self.position >= 0

    @property
    @abc.abstractmethod
    def rows(self) -> Rows | None:
        """What operations need to know of an offloaded cache besides `key` and `value`; None if the cache is resident."""

    @abc.abstractmethod
    def append(self, key: Array, value: Array, position: Array, start: Array | int | None = None) -> Self:
        """Store ``T`` tokens per row.

        Args:
            key: [B, H, T, D].
            value: [B, H, T, D].
            position: int32 [B, T]; EMPTY marks padding, which comes after the real tokens and does not move the cursor.
            start: the first slot, if it is the same for every row (in prompt chunks): one contiguous write in place, which
                writes padding too. None writes each row at its own cursor and does not write padding.
        """

    @abc.abstractmethod
    def append_rotated(self, query: Array, key: Array, value: Array, position: Array, inv_freq: Array) -> tuple[Array, Self]:
        """Rotate the key and the query of a decode step's token, and store the token. On a GPU this is one kernel.

        Args:
            query: [B, H, G, 1, D], before RoPE.
            key: [B, H, 1, D], before RoPE.
            value: [B, H, 1, D].
            position: int32 [B, 1]; EMPTY stores nothing.
            inv_freq: float32 [D/2].

        Returns:
            The rotated query [B, H, G, 1, D], and the cache.
        """

    @abc.abstractmethod
    def resident(self) -> LayerCache:
        """Return the cache with all rows on the device: itself, or a copy of the whole layer that lives while it is used."""

    @abc.abstractmethod
    def rows_at(self, slots: Array) -> tuple[Array, Array]:
        """Read keys and values [B, H, K, D] at ``slots`` int32 [B, K]. In an offloaded cache these slots must have copies."""

    def keys_at(self, slots: Array) -> Array:
        """Read the keys of `rows_at`; jitted, the values are not read."""
        return self.rows_at(slots)[0]

    @abc.abstractmethod
    def keys_between(self, slots: Array) -> Array:
        """Read keys [B, H, K, D] at the consecutive ``slots`` int32 [B, K], from the device or from host memory."""

    @abc.abstractmethod
    def copied(self) -> Array:
        """Count the stored tokens whose rows are on the device, int32 [B]."""


class LayerCache(LayerStorage):
    """Storage with all rows on the device, as methods compress it: plain, divided, as codes, or keys that are the values."""

    @property
    def rows(self) -> None:
        return None

    def resident(self) -> LayerCache:
        return self

    @abc.abstractmethod
    def holding(self, key: Any, value: Any, position: Array, cursor: Array) -> Self:
        """Make a cache of this kind of other arrays; ``key`` and ``value`` have the form of `stored`."""

    def append(self, key: Array, value: Array, position: Array, start: Array | int | None = None) -> Self:
        if start is None and key.shape[2] == 1:
            stored = stored_token(self, key, value, position)
            return self.holding(stored.key, stored.value, stored.position, stored.cursor)
        slot, cursor = next_slots(self, position)
        return self._with_tokens(key, value, position, cursor, slot, start)

    def _with_tokens(
        self, key: Array, value: Array, position: Array, cursor: Array, slot: Array, start: Array | int | None = None
    ) -> Self:
        """Write several tokens (`put_tokens`), behind which the ``cursor`` is."""
        position = put_tokens(self.position, jnp.broadcast_to(position[:, None], key.shape[:3]), slot, start)

        def put(store: Any, new: Array) -> Any:
            return jax.tree.map(lambda old, x: put_tokens(old, x, slot, start), store, stored_like(new, store))

        return self.holding(put(self.stored[0], key), put(self.stored[1], value), position, cursor)

    def append_rotated(self, query: Array, key: Array, value: Array, position: Array, inv_freq: Array) -> tuple[Array, Self]:
        if self.parts > 1:  # the kernel that stores a token would rotate the query only where the token is stored
            query, key = rotate(query, position[:, None, None], inv_freq), rotate(key, position[:, None], inv_freq)
            return query, self.append(key, value, position)
        stored = stored_token(self, key, value, position, query[..., 0, :], inv_freq)
        cache = self.holding(stored.key, stored.value, stored.position, stored.cursor)
        return not_none("query", stored.query)[..., None, :], cache

    def rows_at(self, slots: Array) -> tuple[Array, Array]:
        key, value = (numbers_at(x, slots[:, None]) for x in self.stored)
        return key, value

    def keys_between(self, slots: Array) -> Array:
        return self.keys_at(slots)

    def copied(self) -> Array:
        return self.cursor

    def compact(self, slots: Array, keep: Array, room: int) -> LayerCache:
        """Keep ``slots`` int32 [B, H, K] where ``keep`` bool [B, H, K] is True, and append ``room`` free slots.

        In every head the kept entries must come first. The cursor moves to the end of the longest head of the row.
        """
        position, cursor = kept_positions(self.position, slots, keep, room)
        key, value = (jax.tree.map(lambda x: kept_rows(x, slots, room), store) for store in self.stored)
        return self.holding(key, value, position, cursor)

    def compact_in_place(self, slots: Array, keep: Array, due: Array | None = None) -> LayerCache:
        """Run `compact` with as much room as it leaves; ``slots`` ascend.

        With ``due`` bool [B], other rows of the batch stay as they are.
        """
        position, cursor = kept_positions(self.position, slots, keep, self.num_slots - slots.shape[2])
        if due is not None:
            position = jnp.where(due[:, None, None], position, self.position)
            cursor = jnp.where(due, cursor, self.cursor)
        key, value = (jax.tree.map(lambda x: moved_rows(x, slots, due), store) for store in self.stored)
        return self.holding(key, value, position, cursor)

    def evict(self, score: Array | None, **options: Any) -> tuple[LayerCache, Array | None]:
        """Evict one token per head in rows with more than ``budget`` tokens; scores and options are as in `evict_token`.

        Returns:
            The cache, and the scores of the tokens that are left, or None if no head has scores of its own.
        """
        kept = evict_token(*self.stored, self.position, self.cursor, score, **options)
        return self.holding(kept.key, kept.value, kept.position, kept.cursor), kept.score


@pytree
class PlainCache(LayerCache):
    """Keys and values of one layer, all on the device, in the dtype of the model."""

    key: Array  # [B, H, S, D], in the dtype of the model
    value: Array  # [B, H, S, D]
    position: Array  # int32 [B, H, S], absolute token position; EMPTY if the slot holds no token
    cursor: Array  # int32 [B], the slot for the row's next token

    def holding(self, key: Array, value: Array, position: Array, cursor: Array) -> PlainCache:
        return PlainCache(key=key, value=value, position=position, cursor=cursor)

    def keys_between(self, slots: Array) -> Array:
        return take_between(self.key, slots)


def stored_token(
    cache: LayerStorage, key: Array, value: Array, position: Array, query: Array | None = None, inv_freq: Array | None = None
) -> Stored:
    """Store one more token per row in the arrays of ``cache``: key and value [B, H, 1, D], position int32 [B, 1].

    With a query [B, H, G, D], it and the key are rotated, see `store_token`. In an offloaded cache only the copies on the
    device change. Host memory gets the token at the next sync.
    """
    cache_key, cache_value = cache.stored
    return store_token(
        key[:, :, 0], value[:, :, 0], position[:, 0], cache_key=cache_key, cache_value=cache_value,
        cache_position=cache.position, cursor=cache.cursor, query=query, inv_freq=inv_freq, rows=cache.rows,
    )  # fmt: skip


def next_slots(cache: LayerStorage, position: Array) -> tuple[Array, Array]:
    """Return slots int32 [B, T] for tokens at ``position`` int32 [B, T], S for padding; and the next cursor, int32 [B]."""
    order = jnp.arange(position.shape[1], dtype=jnp.int32)[None]
    slot = jnp.where(position >= 0, cache.cursor[:, None] + order, cache.num_slots)
    return slot, cache.cursor + jnp.sum(position >= 0, axis=1, dtype=jnp.int32)


def put_tokens(store: Array, new: Array, slot: Array, start: Array | int | None) -> Array:
    """Write ``new`` [B, H, T, ...] into ``store`` [B, H, S, ...]: from slot ``start`` on, or at ``slot`` int32 [B, T].

    Without ``start``, a token whose slot is S or more is dropped.
    """
    if start is not None:
        return lax.dynamic_update_slice_in_dim(store, new, start, 2)
    row = jnp.arange(len(slot))[:, None]
    return store.at[row, :, slot].set(new.swapaxes(1, 2), mode="drop")


def empty_cache(batch: int, heads: int, slots: int, head_dim: int, dtype: Any) -> PlainCache:
    """Make a resident cache without tokens."""
    return PlainCache(
        key=jnp.zeros((batch, heads, slots, head_dim), dtype),
        value=jnp.zeros((batch, heads, slots, head_dim), dtype),
        position=jnp.full((batch, heads, slots), EMPTY, jnp.int32),
        cursor=jnp.zeros((batch,), jnp.int32),
    )
