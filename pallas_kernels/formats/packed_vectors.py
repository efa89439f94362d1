"""Packed vectors: the largest coordinates of a vector, and a bitmap of their channels.

A packed vector of D channels is r values in channel order and D bits: int32 words [D/32], channel c being bit ``c % 32`` of
word ``c // 32`` (uint8 [D/8] where D is no multiple of 32). It is expressed in the basis of its segment, so a query is
projected onto the basis of every segment before it meets packed vectors. Source of the format: MosaicKV (arXiv:2607.00760).
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

TERMS = {"bfloat16": 4, "float16": 4, "float32": 1}  # terms of a query: 3 are enough, 4 are a power of two


def words_of(bitmap: Array) -> Array:
    """Convert a bitmap uint8 [..., D/8] to the words of a store: int32 [..., D/32]; unchanged if 32 does not divide D."""
    if bitmap.shape[-1] % 4:
        return bitmap
    return lax.bitcast_convert_type(bitmap.reshape(*bitmap.shape[:-1], -1, 4), jnp.int32)


def bytes_of(bitmap: Array) -> Array:
    """Convert words int32 [..., D/32] to the bitmap uint8 [..., D/8], the inverse of `words_of`."""
    if bitmap.dtype == jnp.uint8:
        return bitmap
    return lax.bitcast_convert_type(bitmap, jnp.uint8).reshape(*bitmap.shape[:-1], -1)


def channel_score(y: Array, element_group: int) -> Array:
    """Score how much a channel is worth keeping: its size, or the sum of the squares of its group of adjacent channels.

    Args:
        y: float32 [..., D].
        element_group: number of adjacent channels that are kept or dropped together; it must divide D.

    Returns:
        float32 [..., D], never negative; equal within a group.
    """
    if element_group == 1:
        return jnp.abs(y)  # not squared: the squares of small numbers would become 0 and tie
    groups = y.reshape(*y.shape[:-1], -1, element_group)
    return jnp.repeat(jnp.sum(groups * groups, axis=-1), element_group, axis=-1)


def pack_channels(y: Array, score: Array, rank: int, dtype: DTypeLike, kept: Array | None = None) -> tuple[Array, Array]:
    """Keep the channels of the highest ``score``; of equal channels the lower one is kept.

    Args:
        y: [..., D].
        score: float32 [..., D].
        rank: number of values r that the result has room for.
        dtype: dtype of the packed values.
        kept: int32 that broadcasts against [..., 1]: how many channels are kept, at most ``rank``. Values past that number
            are zero and have no bit. None keeps ``rank`` channels.

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
    """Unpack vectors, with zeros for channels that were dropped.

    Args:
        values: [..., r] in channel order.
        bitmap: uint8 [..., D/8], bit j of byte i stands for channel 8 i + j; or the words that `words_of` makes of it.
        head_dim: D, the number of channels.

    Returns:
        [..., D] in the dtype of ``values``.
    """
    bitmap = bytes_of(bitmap)
    lead = (1,) * bitmap.ndim
    bit = jnp.left_shift(jnp.uint8(1), jnp.arange(8, dtype=jnp.uint8)).reshape(*lead, 8)
    byte = bitmap[..., None]
    # As many values stand before a channel's value as there are set bits before its bit.
    count = lax.population_count(bitmap).astype(jnp.int32)
    before = (jnp.cumsum(count, axis=-1) - count)[..., None]
    index = before + lax.population_count(byte & (bit - jnp.uint8(1))).astype(jnp.int32)
    shape = (*bitmap.shape[:-1], head_dim)
    full = jnp.take_along_axis(values, index.reshape(shape), axis=-1, mode="clip")
    return jnp.where(((byte & bit) > 0).reshape(shape), full, 0)


def split_terms(x: Array, dtype: jnp.dtype) -> Array:
    """Split ``x`` float32 [..., D] into N terms of ``dtype`` [..., N, D] whose float32 sum is ``x``."""
    terms, info = [], jnp.finfo(dtype)
    for _ in range(min(TERMS[str(dtype)], 3)):
        # XLA may take a cast to ``dtype`` and back for no cast at all, and then nothing would be left for the next term.
        rounded = lax.reduce_precision(x, info.nexp, info.nmant)
        terms.append(rounded.astype(dtype))
        x = x - rounded
    terms += [jnp.zeros_like(terms[0])] * (TERMS[str(dtype)] - len(terms))
    return jnp.stack(terms, axis=-2)


def join_terms(terms: Array) -> Array:
    """Add up the ``terms`` [..., N, D] of `split_terms`: float32 [..., D]. The sum in this order is exact."""
    total = terms[..., 0, :].astype(jnp.float32)
    for term in range(1, terms.shape[-2]):
        total = total + terms[..., term, :].astype(jnp.float32)
    return total


def segments_of(blocks: Array, owner: Array | None, last: Array, span: int) -> Array:
    """Look up the segment of each of ``blocks`` int32 [B, ...].

    It stands in the table ``owner`` int32 [B, P]; without a table it is ``blocks // span``, at most ``last`` int32 [B].
    """
    lead = (-1,) + (1,) * (blocks.ndim - 1)
    if owner is None:
        return jnp.minimum(blocks // span, last.reshape(lead))
    return jax.vmap(lambda table, index: table[index])(owner, jnp.clip(blocks, 0, owner.shape[1] - 1))


def check_format(dim: int, *dtypes: DTypeLike) -> None:
    """Raise ``NotImplementedError`` where kernels do not take packed vectors of ``dim`` channels and arrays of ``dtypes``.

    A vector's bitmap must fill whole words. All arrays must have one dtype, whose products with a query's terms are exact.
    """
    if dim not in (32, 64, 128, 256):
        raise NotImplementedError(f"got head_dim {dim}, expected 32, 64, 128 or 256")
    names = {str(jnp.dtype(x)) for x in dtypes}
    if len(names) != 1 or not names <= set(TERMS):
        raise NotImplementedError(f"got dtypes {sorted(names)}, expected one of {list(TERMS)} for all")
