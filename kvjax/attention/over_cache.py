"""Attention of one layer over its cache: over chosen slots, and over all stored tokens."""

import math
from typing import Any, cast

import jax.numpy as jnp
from jax import Array

from kvjax.attention.sinks import with_sinks
from kvjax.cache import LayerStorage, PlainCache
from kvjax.cache.divided import FEW, merged
from kvjax.cache.packed_keys import ThinCache, pick_channels
from kvjax.cache.storage import Older
from kvjax.protocol.typing import pytree, static
from kvjax.selection import page_slots
from pallas_kernels.attend.causal_attention import causal_attention
from pallas_kernels.attend.dense_attention import dense_attention
from pallas_kernels.attend.dense_decode import dense_decode
from pallas_kernels.attend.gather_attention import gather_attention
from pallas_kernels.attend.past_attention import past_attention
from pallas_kernels.attend.prefix_attention import prefix_attention
from pallas_kernels.numerics import merge_pair
from pallas_kernels.score.column_mass import column_mass
from pallas_kernels.soft_cap import get_soft_cap

_LOGITS = 1 << 20  # the most logits, slots x queries, that dense attention holds at once per query head


@pytree
class Selection:
    """Slots that a decode step attends to: one list per KV head, or one list for all heads (head axis 1).

    With a ``bias`` the query heads of a group may attend to different slots of their list, under logits of their own.
    """

    slots: Array  # int32 [B, H or 1, K], slots in range, or pages of `page_size` slots; no unmasked entry comes twice
    mask: Array  # bool [B, H or 1, K], False = ignore the entry
    page_size: int = static("above 1: `slots` are pages, and all stored tokens of a page are attended", default=1)
    # float32 [B, H, G, K], added to the logits of the listed slots, -inf where a query head does not attend. Then `mask` is
    # True where any query head of the group attends, and no `slots` are pages.
    bias: Array | None = None
    # N partial softmaxes over tokens that are in no slot, under the same softmax: output float32 [B, H, N, G, D] and lse
    # float32 [B, H, N, G]. Only where each device has all slots of its rows.
    partials: tuple[Array, Array] | None = None
    select_aux: Any = None  # for `Step.select_aux`

    def tokens(self, cache: LayerStorage) -> tuple[Array, Array]:
        """Expand the selection to one entry per slot and head: slots int32 and mask bool, [B, H, K * page_size]."""
        slots, mask = page_slots(self.slots, self.page_size), jnp.repeat(self.mask, self.page_size, axis=2)
        shape = (*cache.position.shape[:2], slots.shape[2])
        slots, mask = jnp.broadcast_to(slots, shape), jnp.broadcast_to(mask, shape)
        if self.page_size == 1:
            return slots, mask
        inside = slots < cache.num_slots
        slots = jnp.where(inside, slots, 0)
        return slots, mask & inside & jnp.take_along_axis(cache.valid, slots, axis=2)


def attend_selected(query: Array, cache: LayerStorage, chosen: Selection) -> tuple[Array, Array]:
    """Attend with one query [B, H, G, D] to chosen slots: output [B, H, G, D] and lse float32 [B, H, G].

    If the slots are divided over devices, ``chosen`` has slots of this device, and the result covers the slots of all
    devices.
    """
    out, lse = gather_attention(
        query, *cache.stored, chosen.slots, chosen.mask, scale=1 / math.sqrt(query.shape[-1]), bias=chosen.bias,
        page_size=chosen.page_size, position=cache.position if chosen.page_size > 1 else None, rows=cache.rows,
        partials=chosen.partials,
    )  # fmt: skip
    return merged(out, lse, cache)


def attend_held(query: Array, cache: LayerStorage, gap: Array | None = None) -> tuple[Array, Array]:
    """Attend with the newest token's query [B, H, G, D] to all stored tokens: output [B, H, G, D], lse float32 [B, H, G].

    ``gap``: int32 [B, H, 2], for each KV head a range of empty slots, which need not be read.
    """
    if cache.older is not None:
        return _attend_thin(query, cast("ThinCache", cache))
    cache = cache.resident()
    out, lse = attend_slots(query, cache, gap=gap)
    return merged(out, lse, cache)


def attend_slots(
    query: Array,
    cache: LayerStorage,
    *,
    gap: Array | None = None,
    parts: bool = False,
    mass: bool = False,
    position: Array | None = None,
    scale: float | None = None,
) -> tuple[Array, ...]:
    """Attend to the stored tokens on this device, by `dense_decode`; the cache is resident.

    Args:
        query: [B, H, G, D], of the newest token; or [B, H, G, T, D] at ``position`` int32 [B, T], of at most `FEW` tokens.
        gap: as in `attend_held`.
        parts: whether to return N partial softmaxes, for an operation that merges them: float32 [B, H, N, G, D] and
            [B, H, N, G]. All slots of the rows are on this device.
        mass: whether to return the attention probability of each slot too, float32 [B, H, S], summed over the group and for
            the first query alone. It is made of the logits that attention computes, so no key is read twice. All slots of
            the rows are on this device.

    Returns:
        The output in the shape of the query, and lse float32 without the last axis.
    """
    return dense_decode(
        query, *cache.stored, position=cache.position, limit=cache.here,
        scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale, gap=gap, query_position=position, parts=parts,
        mass=mass,
    )  # fmt: skip


def _attend_thin(query: Array, cache: ThinCache) -> tuple[Array, Array]:
    """Run `attend_held` where the keys of the first slots have only some channels, without unpacking them."""
    older, scale = cache.older, 1 / math.sqrt(query.shape[-1])
    if _has_capped_bias(older):
        newest = jnp.full((len(query), 1), jnp.iinfo(jnp.int32).max)
        out, lse = attend_all(query[..., None, :], cache, newest)
        return out[..., 0, :], lse[..., 0]
    out, lse = dense_decode(
        pick_channels(query, older),
        older.key,
        older.value,
        position=older.position,
        limit=older.limit,
        scale=scale,
        partials=attend_held(query, cache.newer),
    )
    return out, lse


def _has_capped_bias(older: Older) -> bool:
    """Tell whether keys have a bias under a soft cap, which is of the logit alone: one product cannot have both."""
    return older.channels is None and get_soft_cap() is not None


def _attend_biased(query: Array, older: Older, scale: float) -> tuple[Array, Array]:
    """Attend with later queries [B, H, G, T, D] to biased keys, whose logits are capped before the bias; as `attend_all`."""
    dim, held = query.shape[4], older.position >= 0
    flat = query.reshape(*query.shape[:2], -1, dim)
    bias = scale * jnp.sum(older.key[..., dim : dim + 2].astype(jnp.float32), axis=3)
    bias = jnp.broadcast_to(bias[:, :, None], (*flat.shape[:3], bias.shape[2]))
    slots = jnp.broadcast_to(jnp.arange(held.shape[2], dtype=jnp.int32), held.shape)
    out, lse = gather_attention(flat, older.key[..., :dim], older.value, slots, held, scale=scale, bias=bias)
    return out.reshape(query.shape), lse.reshape(query.shape[:4])


def attend_all(query: Array, cache: LayerStorage, position: Array, scale: float | None = None) -> tuple[Array, Array]:
    """Attend causally with queries [B, H, G, T, D] at ``position`` int32 [B, T] to all stored tokens.

    Returns:
        The output [B, H, G, T, D], and lse float32 [B, H, G, T].
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if cache.older is not None:
        older, newer = cache.older, cast("ThinCache", cache).newer
        packed = PlainCache(key=older.key, value=older.value, position=older.position, cursor=older.limit)
        if _has_capped_bias(older):
            part = _attend_biased(query, older, scale)
        else:
            part = attend_all(pick_channels(query, older), packed, position, scale)
        return merge_pair(*part, *attend_all(query, newer, position))
    cache = cache.resident()
    tokens = query.shape[3]
    if 0 < tokens <= FEW:  # a decode kernel reads the cache once for them, and codes as they are
        out, lse = attend_slots(query, cache, position=position, scale=scale)
        return merged(out, lse, cache)
    block = max(1024, _LOGITS // max(tokens, 1))  # all slots at once for one query, block by block for many
    out, lse = dense_attention(
        query, cache.key, cache.value, query_position=position, key_position=cache.position, scale=scale, block=block
    )
    return merged(out, lse, cache)


def attend_stored(
    query: Array, cache: LayerStorage, position: Array, observes: bool, gap: Array | None = None, sinks: Array | None = None
) -> tuple[Array, Array | None]:
    """Attend with the newest tokens' queries to all stored tokens, densely.

    Args:
        query: [B, H, G, T, D], rotated.
        position: int32 [B, T], EMPTY for padding.

    Returns:
        The output [B, H, G, T, D]; and `mass_of` if ``observes``, else None.
    """
    if query.shape[3] > 1:
        out, lse = attend_all(query, cache, position)
    elif observes and cache.parts == 1 and sinks is None:
        out, _, mass = attend_slots(query[..., 0, :], cache.resident(), gap=gap, mass=True)
        return out[..., None, :], mass
    else:
        out, lse = attend_held(query[..., 0, :], cache, gap)
        out, lse = out[..., None, :], lse[..., None]
    out, lse = with_sinks(out, lse, sinks)
    return out, mass_of(query, cache, position, lse) if observes else None


def mass_of(query: Array, cache: LayerStorage, position: Array, lse: Array, limit: Array | int | None = None) -> Array:
    """Sum the attention probability of each slot over queries and group: float32 [B, H, S]; see `column_mass`."""
    key, scale = cache.resident().key, 1 / math.sqrt(query.shape[-1])
    return column_mass(query, key, lse, query_position=position, key_position=cache.position, scale=scale, limit=limit)


def attend_whole(query: Array, key: Array, value: Array, position: Array, sinks: Array | None) -> Array:
    """Attend causally with whole prompts to themselves: [B, H, G, T, D].

    Args:
        query: [B, H, G, T, D], rotated.
        key: [B, H, T, D], rotated.
        value: [B, H, T, D].
        position: int32 [B, T], EMPTY for padding.
    """
    if sinks is None:
        return causal_attention(query, key, value)
    scale, real = 1 / math.sqrt(query.shape[-1]), jnp.sum(position >= 0, axis=1, dtype=jnp.int32)
    return with_sinks(*prefix_attention(query, key, value, start=0, length=real, scale=scale), sinks)[0]


def attend_behind(
    query: Array, key: Array, value: Array, cache: LayerStorage, position: Array, sinks: Array | None = None
) -> tuple[Array, Array, tuple[Array, Array]]:
    """Attend causally with tokens that are not stored to all stored tokens and to the tokens themselves.

    Args:
        query: [B, H, G, T, D], rotated.
        key: [B, H, T, D], rotated.
        value: [B, H, T, D].
        cache: has earlier tokens only, in its first slots; resident and not divided over devices.
        position: int32 [B, T], EMPTY for padding.

    Returns:
        out [B, H, G, T, D], 0 for padding; lse float32 [B, H, G, T] over the tokens themselves, without the stored tokens;
        -inf for padding; and out and lse over the stored tokens alone.
    """
    scale, real = 1 / math.sqrt(query.shape[-1]), jnp.sum(position >= 0, axis=1, dtype=jnp.int32)
    past = past_attention(query, cache.key, cache.value, count=cache.cursor, scale=scale)
    own, lse = prefix_attention(query, key, value, start=0, length=real, scale=scale)
    out, _ = with_sinks(*merge_pair(own, lse, *past), sinks)
    return jnp.where((position >= 0)[:, None, None, :, None], out, 0), lse, past
