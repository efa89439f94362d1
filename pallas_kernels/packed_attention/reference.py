"""Packed vectors in plain JAX: packing by sorting, scores and attention by unpacking all that is asked for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from pallas_kernels.numerics import finite_or_zero

exact = {"precision": lax.Precision.HIGHEST}  # of products that decide what is attended to
PARTS = {"bfloat16": 4, "float16": 4, "float32": 1}  # terms of a query: 3 are enough, 4 are a power of two


def words_of(bitmap: Array) -> Array:
    """A bitmap uint8 [..., D/8] as the store holds it: int32 [..., D/32], or unchanged where D is no multiple of 32."""
    if bitmap.shape[-1] % 4:
        return bitmap
    return lax.bitcast_convert_type(bitmap.reshape(*bitmap.shape[:-1], -1, 4), jnp.int32)


def bytes_of(bitmap: Array) -> Array:
    """The bitmap uint8 [..., D/8] behind `words_of`."""
    if bitmap.dtype == jnp.uint8:
        return bitmap
    return lax.bitcast_convert_type(bitmap, jnp.uint8).reshape(*bitmap.shape[:-1], -1)


def channel_score(y: Array, element_group: int) -> Array:
    """What makes a channel worth keeping: its size, or the squared sum of its group of adjacent channels.

    Args:
        y: float32 [..., D].
        element_group: channels kept or dropped together, must divide D.

    Returns:
        float32 [..., D], never negative; equal within a group.
    """
    if element_group == 1:
        return jnp.abs(y)  # not squared: small numbers would vanish and tie
    groups = y.reshape(*y.shape[:-1], -1, element_group)
    return jnp.repeat(jnp.sum(groups * groups, axis=-1), element_group, axis=-1)


def pack_channels(
    y: Array, score: Array, rank: int, dtype: DTypeLike, kept: Array | None = None
) -> tuple[Array, Array]:
    """Keep the channels of the highest ``score``, ties to the lower channel.

    Args:
        y: [..., D].
        score: float32 [..., D].
        rank: channels with room for their values.
        dtype: of the values.
        kept: int32, broadcasts against [..., 1]: channels really kept, at most ``rank``; None = ``rank``. Values past it
            are zero and have no bit.

    Returns:
        values [..., rank] in channel order and bitmap uint8 [..., D/8].
    """
    dim, lead = y.shape[-1], (1,) * (y.ndim - 1)
    _, channel = lax.top_k(score, rank)
    if kept is not None:
        channel = jnp.where(jnp.arange(rank).reshape(*lead, -1) < kept, channel, dim)
    channel = jnp.sort(channel, axis=-1)
    values = jnp.take_along_axis(y, jnp.minimum(channel, dim - 1), axis=-1)
    if kept is not None:
        values = jnp.where(channel < dim, values, 0)
    byte = jnp.arange(dim // 8, dtype=jnp.int32).reshape(*lead, -1, 1)
    bit = jnp.where((channel // 8)[..., None, :] == byte, (1 << (channel % 8))[..., None, :], 0)
    return values.astype(dtype), jnp.sum(bit, axis=-1).astype(jnp.uint8)


def unpack(values: Array, bitmap: Array, head_dim: int) -> Array:
    """The vectors with zeros where a channel was dropped.

    Args:
        values: [..., r] in channel order.
        bitmap: uint8 [..., D/8], bit j of byte i standing for channel 8 i + j; or as `words_of` makes it.
        head_dim: D, channels.

    Returns:
        [..., D] in the dtype of ``values``.
    """
    bitmap = bytes_of(bitmap)
    lead = (1,) * bitmap.ndim
    bit = jnp.left_shift(jnp.uint8(1), jnp.arange(8, dtype=jnp.uint8)).reshape(*lead, 8)
    byte = bitmap[..., None]
    # A channel's value stands behind as many others as there are set bits before its own.
    count = lax.population_count(bitmap).astype(jnp.int32)
    before = (jnp.cumsum(count, axis=-1) - count)[..., None]
    index = before + lax.population_count(byte & (bit - jnp.uint8(1))).astype(jnp.int32)
    shape = (*bitmap.shape[:-1], head_dim)
    full = jnp.take_along_axis(values, index.reshape(shape), axis=-1, mode="clip")
    return jnp.where(((byte & bit) > 0).reshape(shape), full, 0)


def split(x: Array, dtype: jnp.dtype) -> Array:
    """x float32 [..., D] as terms [..., N, D] of ``dtype`` whose float32 sum is x again."""
    terms = []
    for _ in range(min(PARTS[str(dtype)], 3)):
        terms.append(x.astype(dtype))
        x = x - terms[-1].astype(jnp.float32)
    terms += [jnp.zeros_like(terms[0])] * (PARTS[str(dtype)] - len(terms))
    return jnp.stack(terms, axis=-2)


def joined(parts: Array) -> Array:
    """The float32 sum over the terms of `split`, in their order, which is exact: [..., N, D] to [..., D]."""
    total = parts[..., 0, :].astype(jnp.float32)
    for part in range(1, parts.shape[-2]):
        total = total + parts[..., part, :].astype(jnp.float32)
    return total


def turn_query(query: Array, basis: Array, *, dtype: jnp.dtype) -> Array:
    """See ``pallas_kernels.packed_attention.turn_query``."""
    turned = jnp.einsum("bhgd,bhmed->bhmge", query.astype(jnp.float32), basis, **exact)
    return split(turned, dtype)


def owners(blocks: Array, owner: Array | None, last: Array, span: int) -> Array:
    """Segment of each block int32 [B, ...]; see ``packed_score``."""
    lead = (-1,) + (1,) * (blocks.ndim - 1)
    if owner is None:
        return jnp.minimum(blocks // span, last.reshape(lead))
    return jax.vmap(lambda table, index: table[index])(owner, jnp.clip(blocks, 0, owner.shape[1] - 1))


def packed_score(parts, values, bitmap, count, last, *, span, unit, owner, reduce):
    """See ``pallas_kernels.packed_attention.packed_score``."""
    query = joined(parts)
    rows, blocks, segments = query.shape[0], values.shape[2], query.shape[2]
    number = jnp.arange(blocks, dtype=jnp.int32)
    segment = owners(jnp.broadcast_to(number[None], (rows, blocks)), owner, last, span)[:, None, None, None]
    scores, piece = [], span if owner is None else blocks
    # Where segments are equal pieces of the list, a piece meets its own query only.
    for index, first in enumerate(range(0, blocks, piece)):
        at = slice(first, min(first + piece, blocks))
        mean = unpack(values[:, :, at], bitmap[:, :, at], query.shape[-1]).astype(jnp.float32)
        if owner is None:
            mine = query[jnp.arange(rows), :, jnp.minimum(index, last)]
            scores.append(jnp.einsum("bhge,bhpe->bhgp", mine, mean, **exact))
        else:
            every = jnp.einsum("bhmge,bhpe->bhgmp", query, mean, **exact)
            member = segment == jnp.arange(segments, dtype=jnp.int32)[None, None, None, :, None]
            scores.append(jnp.where(member, every, 0).sum(axis=3))
    score = jnp.concatenate(scores, axis=-1)
    visible = number[None, None] < (count // unit)[:, None, None]
    if reduce is None:
        return jnp.where(visible[:, :, None], score, -jnp.inf)
    score = score.max(axis=2) if reduce == "max" else score.mean(axis=2)
    return jnp.where(visible, score, -jnp.inf)


def packed_attention(parts, query, key, value, basis, blocks, count, last, recent, *, scale, granule, span, owner):
    """See ``pallas_kernels.packed_attention.packed_attention``."""
    (rows, heads, listed), dim = blocks.shape, query.shape[-1]
    slot = blocks[..., None] * granule + jnp.arange(granule, dtype=jnp.int32)[None, None, None]
    slot = slot.reshape(rows, heads, -1)
    seen = jnp.repeat(jnp.arange(listed)[None, None] < count[..., None], granule, axis=2)
    slot = jnp.where(seen, slot, 0)

    def take(values: Array, bitmap: Array) -> Array:
        values, bitmap = (jnp.take_along_axis(x, slot[..., None], axis=2) for x in (values, bitmap))
        return jnp.where(seen[..., None], unpack(values, bitmap, dim), 0).astype(jnp.float32)

    segment = owners(jnp.where(seen, slot // granule, 0), owner, last, span)
    segments = jnp.arange(parts.shape[2], dtype=jnp.int32)[None, None, None, :, None]
    member = segment[:, :, None, None] == segments  # [B, H, 1, M, K]
    logits = jnp.einsum("bhmge,bhke->bhgmk", joined(parts), take(*key), **exact)
    logits = jnp.where(member, logits, 0).sum(axis=3)
    recent_key, recent_value, stored = recent
    held = stored[..., None] >= 0
    recent_key, recent_value = (jnp.where(held, x, 0).astype(jnp.float32) for x in (recent_key, recent_value))
    newest = jnp.einsum("bhgd,bhsd->bhgs", query.astype(jnp.float32), recent_key, **exact)
    logits = jnp.concatenate([logits, newest], axis=-1) * scale
    visible = jnp.concatenate([seen, stored >= 0], axis=-1)[:, :, None]
    logits = jnp.where(visible, logits, -jnp.inf)
    weight = jnp.exp(logits - finite_or_zero(jnp.max(logits, axis=-1, keepdims=True)))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    weight = weight / jnp.where(total > 0, total, 1)
    packed = jnp.where(member, weight[..., None, : listed * granule], 0)
    out = jnp.einsum("bhgmk,bhke->bhgme", packed, take(*value), **exact)
    out = jnp.einsum("bhgme,bhmed->bhgd", out, basis, **exact)
    newest = jnp.einsum("bhgs,bhsd->bhgd", weight[..., listed * granule :], recent_value, **exact)
    return (out + newest).astype(query.dtype)


def pack_token(
    key, value, stored, place, packed, last, basis_key, basis_value, store, *, granule, element_group, channels
):
    """See ``pallas_kernels.packed_attention.pack_token``."""
    rank = store[0].shape[-1]
    at, number = jnp.maximum(place - packed, 0), jnp.arange(place.shape[0])
    first = at // granule * granule
    window = jnp.minimum(first[:, None] + jnp.arange(granule, dtype=jnp.int32)[None], key.shape[2] - 1)
    held = jnp.take_along_axis(stored, window[:, None], axis=2)[..., None] >= 0
    keys = jnp.where(held, jnp.take_along_axis(key, window[:, None, :, None], axis=2), 0).astype(jnp.float32)
    newest = (jnp.take_along_axis(x, at[:, None, None, None], axis=2).astype(jnp.float32) for x in (key, value))
    bases = [x[:, :, 0] if x.shape[2] == 1 else x[number, :, last] for x in (basis_key, basis_value)]
    new = []
    for x, basis in zip((*newest, keys.mean(axis=2, keepdims=True)), (*bases, bases[0]), strict=True):
        turned = jnp.einsum("bhsd,bhed->bhse", x, basis, **exact)
        score = channel_score(turned, element_group)
        if channels < score.shape[-1]:
            score = jnp.where(jnp.arange(score.shape[-1])[None, None, None] < channels, score, -1)
        values, bitmap = pack_channels(turned, score, rank, store[0].dtype)
        new += [values, words_of(bitmap)]
    places = [place] * 4 + [place // granule] * 2
    return tuple(
        old.at[number, :, jnp.where(place >= 0, index, old.shape[2])].set(x[:, :, 0], mode="drop")
        for old, x, index in zip(store, new, places, strict=True)
    )
