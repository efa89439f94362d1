"""Sparse vectors in fixed space: the kept channels of a vector and a bitmap that says which they are.

A vector of D channels with r kept becomes r values in channel order and D/8 bytes, bit j of byte i standing for channel
8 i + j. Packing sorts and gathers, unpacking counts bits and gathers; nothing is scattered, so both fuse with their
neighbours. Source: MosaicKV (arXiv:2607.00760), packed format with per-vector channels.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike


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


def pack(y: Array, rank: int, element_group: int = 1, dtype: DTypeLike | None = None) -> tuple[Array, Array]:
    """Keep the ``rank`` largest channels of every vector; equal ones by lower channel.

    Args:
        y: [..., D], D a multiple of 8.
        rank: channels kept, a multiple of ``element_group``.
        element_group: adjacent channels that are kept or dropped together, by their squared sum.
        dtype: of the values; None = that of ``y``.

    Returns:
        values [..., rank] in channel order and bitmap uint8 [..., D/8].

    Raises:
        ValueError: D is no multiple of 8 or of ``element_group``, or ``rank`` is not one of its multiples up to D.
    """
    dim = y.shape[-1]
    if dim % 8 or dim % element_group:
        raise ValueError(
            f"pack: vectors must have a multiple of 8 and of element_group={element_group} channels, got {dim}"
        )
    if not 1 <= rank <= dim or rank % element_group:
        raise ValueError(f"pack: rank must be a multiple of element_group={element_group} from 1 to {dim}, got {rank}")
    return pack_channels(
        y, channel_score(y.astype(jnp.float32), element_group), rank, y.dtype if dtype is None else dtype
    )


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
        bitmap: uint8 [..., D/8].
        head_dim: D, channels.

    Returns:
        [..., D] in the dtype of ``values``.
    """
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


def bytes_per_vector(rank: int | Array, channels: int, element_group: int | Array, itemsize: int) -> float | Array:
    """Bytes of one packed vector: its values, and one bit for each group of the ``channels`` that may be kept."""
    return rank * itemsize + channels / (8 * element_group)


def bytes_per_token(
    head_dim: int, rank: int, element_group: int, block_size: int, itemsize: int = 2, truncate: bool = False
) -> float:
    """Bytes of a packed token of one KV head: key, value, and its share of the block's mean key.

    ``truncate``: the last quarter of the ``head_dim`` channels is never kept and has no bits.
    """
    channels = 3 * head_dim // 4 if truncate else head_dim
    return bytes_per_vector(rank, channels, element_group, itemsize) * (2 + 1 / block_size)
