"""One row over several devices: each device along the mesh's axis ``slots`` has a part of the slots of every row.

If S slots are allocated on each device, device d has the slots from ``d * S`` on: a row fills the first device, then the
second. So every array is in the order that it has on one device, and what a method says of a range of slots or of the lowest
slot holds for the part, too. The devices have equal copies of all else: weights, cursors, logits, activations.

A token is stored on the device that has its slot. Its query attends to each part, and the results merge by their log-sum-exp
(`merged`). The best slots are found among the best slots of each part (`best_slots`), so the choice is the same as on one
device.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache.storage import LayerCache, LayerSpec, LayerStorage, PlainCache
from kvjax.protocol.typing import EMPTY, not_none, pytree, static
from kvjax.selection import kept_positions, kept_rows
from pallas_kernels import axes
from pallas_kernels.attend.past_attention import past_attention
from pallas_kernels.attend.prefix_attention import prefix_attention
from pallas_kernels.choose.kth_select import kth_select, kth_select_mask
from pallas_kernels.numerics import finite_or_zero, log_denominator, merge_pair, merge_partials
from pallas_kernels.store.store_token import store_token

FEW = 8  # tokens whose attention costs about what one token's costs: it reads the cache once, and sends one message


@pytree
class PartCache(LayerCache):
    """One device's slots of each row, where ``parts`` devices divide them; outside of `jax.shard_map` all slots."""

    key: Array  # [B, H, S, D], in the dtype of the model
    value: Array  # [B, H, S, D]
    position: Array  # int32 [B, H, S], absolute token position; EMPTY if the slot holds no token
    cursor: Array  # int32 [B], the slot for the row's next token, among the slots of all devices
    parts: int = static("devices over which the slots of a row are divided")

    def holding(self, key: Any, value: Any, position: Array, cursor: Array) -> PartCache:
        return PartCache(key=key, value=value, position=position, cursor=cursor, parts=self.parts)

    def append(self, key: Array, value: Array, position: Array, start: Array | int | None = None) -> PartCache:
        """Store tokens as `LayerStorage.append` does. A chunk may begin on another device, so no padding is written."""
        slot, mine, cursor = next_here(self, position)
        if key.shape[2] > 1:
            slot = jnp.where(mine, slot, self.num_slots)  # is dropped
            return self._with_tokens(key, value, position, cursor, slot)
        stored = store_token(
            key[:, :, 0],
            value[:, :, 0],
            jnp.where(mine, position, EMPTY)[:, 0],
            cache_key=self.key,
            cache_value=self.value,
            cache_position=self.position,
            cursor=jnp.clip(slot, 0, self.num_slots - 1)[:, 0],
        )
        return self.holding(stored.key, stored.value, stored.position, cursor)

    def compact(self, slots: Array, keep: Array, room: int) -> LayerCache:
        """Run `LayerCache.compact` for ``slots`` int32 [B, H, K] of all devices: each device gets all kept tokens."""
        position, cursor = kept_positions(whole(self.position, self), slots, keep, room)
        key, value = (kept_of_all(x, slots, room, self) for x in (self.key, self.value))
        return PlainCache(key=key, value=value, position=position, cursor=cursor)

    def evict(self, score: Array | None, **options: Any) -> tuple[LayerCache, Array | None]:
        raise NotImplementedError("slots that are divided over devices evict no single token")


def next_here(cache: LayerStorage, position: Array) -> tuple[Array, Array, Array]:
    """Compute the slots of new tokens at ``position`` int32 [B, T], counted from this device's first slot.

    Returns:
        The slots int32 [B, T], any value for padding and for tokens of other devices; whether each token is stored on this
        device, bool [B, T]; and the cursor after the tokens, int32 [B].
    """
    real = position >= 0
    slot = cache.here[:, None] + jnp.arange(position.shape[1], dtype=jnp.int32)[None]
    mine = real & (slot >= 0) & (slot < cache.num_slots)
    return slot, mine, cache.cursor + jnp.sum(real, axis=1, dtype=jnp.int32)


def part_slots(spec: LayerSpec, slots: int, block: int | None) -> int:
    """Compute the slots to allocate for ``slots`` tokens of a row: this device's part, in whole blocks of ``block``."""
    if spec.parts == 1:
        return slots
    size = not_none("slot_block", block)
    each = -(-slots // (spec.parts * size)) * size
    return each if axes.is_split(axes.SLOTS) else each * spec.parts


def empty_part(spec: LayerSpec, slots: int) -> PartCache:
    """Make a cache without tokens, of ``slots`` slots on this device."""
    shape = spec.batch, spec.num_kv_heads, slots
    return PartCache(
        key=jnp.zeros((*shape, spec.head_dim), spec.dtype),
        value=jnp.zeros((*shape, spec.head_dim), spec.dtype),
        position=jnp.full(shape, EMPTY, jnp.int32),
        cursor=jnp.zeros((spec.batch,), jnp.int32),
        parts=spec.parts,
    )


def total(x: Array, cache: LayerStorage) -> Array:
    """Sum ``x`` over the devices that have parts of ``cache``."""
    return axes.total(x, axes.SLOTS) if cache.parts > 1 else x


def whole(x: Array, cache: LayerStorage, dim: int = 2) -> Array:
    """Gather ``x`` from all devices along ``dim``, where it has the slots of this device's part of ``cache``."""
    return axes.joined(x, dim, axes.SLOTS) if cache.parts > 1 else x


def kept_of_all(store: Array, slots: Array, room: int, cache: LayerStorage) -> Array:
    """Run `kept_rows` for ``slots`` of all devices, with equal results on all; ``store`` has this device's part."""
    if cache.parts == 1:
        return kept_rows(store, slots, room)
    at, mine = here(slots, jnp.ones(slots.shape, bool), cache)
    kept = kept_rows(store, at, 0)
    bits = lax.bitcast_convert_type(kept, jnp.uint8) if kept.dtype.itemsize == 1 else kept  # codes are added as bits
    bits = total(jnp.where(mine.reshape(*mine.shape, *(1,) * (bits.ndim - 3)), bits, jnp.zeros((), bits.dtype)), cache)
    kept = lax.bitcast_convert_type(bits, kept.dtype)
    return jnp.pad(kept, ((0, 0), (0, 0), (0, room), *((0, 0),) * (kept.ndim - 3)))


def merged(out: Array, lse: Array, cache: LayerStorage) -> tuple[Array, Array]:
    """Merge attention to this device's part of the slots into attention to all slots of the rows.

    Args:
        out: [..., D], 0 where the part has no slot to attend to.
        lse: float32 [...], the log of the softmax denominator, -inf where the part has no slot to attend to.
    """
    if cache.parts == 1 or not axes.is_split(axes.SLOTS):
        return out, lse
    wide = out.astype(jnp.float32)
    if out.ndim < 5 or out.shape[3] <= FEW:  # one message, whose time is its latency
        every = lax.all_gather(jnp.concatenate([wide, lse[..., None]], axis=-1), axes.SLOTS)
        wide, lse = merge_partials(every[..., :-1], every[..., -1])
        return wide.astype(out.dtype), lse
    shift = finite_or_zero(axes.most(lax.stop_gradient(lse), axes.SLOTS))  # many tokens: send as few bytes as possible
    weight = jnp.exp(lse - shift)
    added = axes.total(jnp.concatenate([wide * weight[..., None], weight[..., None]], axis=-1), axes.SLOTS)
    weight = added[..., -1]
    wide = added[..., :-1] / jnp.where(weight > 0, weight, 1)[..., None]
    return wide.astype(out.dtype), log_denominator(shift, weight)


def attend_past(query: Array, key: Array, value: Array, cache: LayerStorage, position: Array) -> tuple[Array, Array]:
    """Attend causally with a prompt chunk to itself, on every device, and to all parts of the earlier tokens.

    Args:
        query: [B, H, G, T, D], rotated.
        key: [B, H, T, D], rotated.
        value: [B, H, T, D].
        position: int32 [B, T], EMPTY for padding.

    Returns:
        The output [B, H, G, T, D], and the log of the softmax denominators, float32 [B, H, G, T]; any values for padding.
    """
    scale = 1 / math.sqrt(query.shape[-1])
    length = jnp.sum(position >= 0, axis=1, dtype=jnp.int32)
    before = jnp.clip(cache.here - length, 0, cache.num_slots)
    past, past_lse = merged(*past_attention(query, cache.key, cache.value, count=before, scale=scale), cache)
    own, own_lse = prefix_attention(query, key, value, start=0, scale=scale)
    return merge_pair(own, own_lse, past, past_lse)


def best_slots(score: Array, wanted: Array | int, capacity: int, cache: LayerStorage) -> tuple[Array, Array]:
    """Find the ``wanted`` best entries of each head on all devices, and list the entries that this device has.

    It is `kth_select_mask` where the slots are not divided. Each device sends the scores of its best entries.

    Args:
        score: float32 [B, H, P], of this device's slots or pages; -inf is never chosen; in a tie the lower index wins.
        capacity: static, K or more.

    Returns:
        int32 [B, H, K], entries of ``score``, and whether each is chosen, bool [B, H, K].
    """
    mine, listed = kth_select_mask(score, wanted, min(capacity, score.shape[2]))
    if cache.parts == 1 or not axes.is_split(axes.SLOTS):
        return mine, listed
    best = jnp.where(listed, jnp.take_along_axis(score, mine, axis=2), -jnp.inf)
    # Each list is ascending, and a device has lower slots than the next: a tie is decided as on one device.
    every = axes.joined(best, 2, axes.SLOTS)
    at, kept = kth_select_mask(every, wanted, min(capacity, every.shape[2]))
    at = at - axes.index(axes.SLOTS) * mine.shape[2]
    kept = kept & (at >= 0) & (at < mine.shape[2])
    return jnp.take_along_axis(mine, jnp.where(kept, at, 0), axis=2), kept


def best_of_rows(score: Array, wanted: Array, capacity: int, cache: LayerStorage) -> Array:
    """Find the ``wanted`` best slots of each head on all devices, and list on each device their indices in the row.

    Args:
        score: float32 [B, H, S], of this device's slots; see `best_slots`.
        wanted: int32 [B, H].
        capacity: static, K.

    Returns:
        int32 [B, H, K], ascending, and 0 in unused entries.
    """
    if cache.parts == 1 or not axes.is_split(axes.SLOTS):
        return kth_select(score, wanted, capacity)[0]
    mine, listed = kth_select_mask(score, wanted, min(capacity, score.shape[2]))
    best = jnp.where(listed, jnp.take_along_axis(score, mine, axis=2), -jnp.inf)
    both = jnp.stack([lax.bitcast_convert_type(best, jnp.int32), mine + cache.first])  # one message
    best, slots = axes.joined(both, 3, axes.SLOTS)
    at, kept = kth_select_mask(lax.bitcast_convert_type(best, jnp.float32), wanted, capacity)
    return jnp.where(kept, jnp.take_along_axis(slots, at, axis=2), 0)


def here(entry: Array, used: Array, cache: LayerStorage, size: int = 1) -> tuple[Array, Array]:
    """Convert slots, or pages of ``size`` slots, from indices in the row to indices on this device.

    Args:
        entry: int32 of any shape.
        used: bool of this shape.

    Returns:
        int32, 0 for entries of other devices; and whether each entry is used and on this device, bool.
    """
    if cache.parts == 1:
        return entry, used
    entry = entry - cache.first // size
    used = used & (entry >= 0) & (entry < cache.num_slots // size)
    return jnp.where(used, entry, 0), used


def log_total(lse: Array, cache: LayerStorage) -> Array:
    """Sum exp(``lse``) over the devices that have parts, and return the log: float32 of any shape; -inf for no slots."""
    if cache.parts == 1 or not axes.is_split(axes.SLOTS):
        return lse
    return jax.nn.logsumexp(lax.all_gather(lse, axes.SLOTS), axis=0)
