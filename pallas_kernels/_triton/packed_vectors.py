"""Packed vectors inside a kernel: their segments, their products with queries, and a tile of them unpacked.

Products (`product_tile`): each thread has one vector. It walks through the r bits that are set. For each bit it reads the
entries of all query heads at that channel from a table that stays in the first-level cache: 16 bytes for four heads. That
takes some 25 instructions per kept value, where unpacking takes 10 per channel, kept or not. Threads exchange nothing.
Bitmap and values are read at once, in loads of 16 bytes.

Unpacking (`unpack_tile`) is faster for attention. A program reads the bitmaps of a tile of vectors once, a vector per thread,
and counts the bits before every byte with a few operations on whole words. Then 16 threads (D = 128) share a vector, and each
has one byte of the bitmap. As many values stand before a channel's value as there are bits before its bit; neighbouring
threads read from the same cache line. The eight channels of a thread lie next to each other, as a matrix product needs them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.formats.packed_vectors import TERMS


def query_table(parts: jax.Array) -> jax.Array:
    """Arrange projected queries [B, H, M, G, N, D] for `product_tile`: float32 [B * H, M * D * Gp], heads padded to Gp.

    XLA computes this table outside of the kernel; it takes a few KiB.
    """
    rows, heads, _, group, terms, _ = parts.shape
    # Slices and a stack become one kernel of XLA; a sum and a transposition would become two.
    query = [sum(parts[..., g, n, :].astype(jnp.float32) for n in range(terms)) for g in range(group)]
    query += [jnp.zeros_like(query[0])] * (pl.next_power_of_2(group) - group)
    return jnp.stack(query, axis=-1).reshape(rows * heads, -1)


def product_tile(table_ref: Any, values_ref: Any, words_ref: Any, row: jax.Array, first: jax.Array, group: int) -> jax.Array:
    """Multiply the vectors ``row`` int32 [N] with ``group`` queries (a power of two): float32 [N, group].

    Args:
        table_ref: float32 [channels of all segments * group], see `query_table`.
        values_ref: [S * r]; a vector with fewer than r bits has zeros behind its values.
        words_ref: int32 [S, D/32]. Channel c is bit ``c % 32`` of word ``c // 32``.
        row: int32 [N], in range; best with as many entries as the program has threads.
        first: int32 [N], the table's channel at which the vector's segment begins.
        group: query heads in the table.
    """
    words = words_ref[row, :]
    number, per_vector = words.shape
    rank = values_ref.shape[0] // words_ref.shape[0]
    word = [_column(words, k) for k in range(per_vector)]
    begin = [jnp.zeros_like(row)]  # values before each word
    for k in range(1, per_vector):
        begin.append(begin[-1] + lax.population_count(word[k - 1]))
    size = min(8, pl.next_power_of_2(rank))  # values per load
    bits = jnp.int16 if values_ref.dtype.itemsize == 2 else jnp.int32
    values = []
    for i in range(0, rank, size):
        at = i + jnp.arange(size, dtype=jnp.int32)
        # The last load repeats the last value where r is no multiple of its size.
        at = at if i + size <= rank else jnp.minimum(at, rank - 1)
        at = jnp.broadcast_to(row[:, None] * rank, (number, size)) + at[None]
        # As integers: `_column` adds them up, which must not change a bit.
        values.append(lax.bitcast_convert_type(plt.load(values_ref.at[at]), bits))
    heads = jnp.broadcast_to(jnp.arange(group, dtype=jnp.int32)[None], (number, group))
    first = first * group
    left, base = word[0], first  # bits of the word that are left, and the table entry of the word's first channel
    total = jnp.zeros((number, group), jnp.float32)
    for i in range(rank):
        # Go on to the word whose first value this is. Of words that begin at the same value, all but the last are empty.
        for k in range(1, per_vector):
            here = begin[k] == i
            left, base = jnp.where(here, word[k], left), jnp.where(here, first + 32 * k * group, base)
        below = left - 1
        # The number of zeros below the lowest set bit is its channel within the word. Where no bit is left it is the last
        # channel, whose query meets a value of zero.
        entry = pl.multiple_of(base + group * lax.population_count(~left & below & 0x7FFFFFFF), group)
        left = left & below  # clears the lowest bit
        value = lax.bitcast_convert_type(_column(values[i // size], i % size), values_ref.dtype).astype(jnp.float32)
        query = plt.load(table_ref.at[jnp.broadcast_to(entry[:, None], heads.shape) + heads])
        total = total + value[:, None] * query
    return total


def _column(x: jax.Array, at: int) -> jax.Array:
    """Select column ``at`` of integers [N, C]. If a thread has whole rows, the compiler takes the register that holds it."""
    number = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape)
    return jnp.sum(jnp.where(number == at, x, jnp.zeros_like(x)), axis=1, dtype=x.dtype)


def unpack_tile(values_ref: Any, words: jax.Array, row: jax.Array, rank: int) -> jax.Array:
    """Unpack vectors ``row`` int32 [N] of values [S * r] with bitmaps ``words`` int32 [N, D/32]: [N, D] in their dtype.

    N and D are powers of two, ``row`` is in range. Channel c is bit ``c % 32`` of word ``c // 32``.
    """
    number, per_vector = words.shape
    each = jnp.broadcast_to(8 * jnp.arange(4, dtype=jnp.int32)[None, None], (number, per_vector, 4))

    def byte_of(x: jax.Array) -> jax.Array:  # the four bytes of every word, int32 [N, D/8]; higher bits may be set
        x = jnp.broadcast_to(x[:, :, None], each.shape)
        return lax.shift_right_logical(x, each).reshape(number, -1)

    bits = byte_of(words)
    # The value of the byte's first set bit; a kept channel moves the index to the next value.
    index = jnp.broadcast_to(row[:, None] * rank, bits.shape) + (byte_of(_bits_before(words)) & 255)
    channels = []
    for j in range(8):
        kept = (bits & (1 << j)) != 0
        value = plt.load(values_ref.at[index], mask=kept, other=0)
        channels.append(value)
        index = index + kept.astype(jnp.int32)
    # Eight blocks [N, D/8] become one [N, D]: stacking the halves of the list leaves a byte's channels side by side in order.
    for half in (4, 2, 1):
        channels = [jnp.stack([channels[j], channels[j + half]], axis=-1) for j in range(half)]
    return channels[0].reshape(number, -1)


def _bits_before(words: jax.Array) -> jax.Array:
    """Count the set bits before each byte in a row of words int32 [N, W]: int32 [N, W], a byte of each word per byte."""
    shift = lax.shift_right_logical
    # Set bits of every pair of bits, of every four, of every byte.
    count = words - (shift(words, 1) & 0x55555555)
    count = (count & 0x33333333) + (shift(count, 2) & 0x33333333)
    count = ((count + shift(count, 4)) & 0x0F0F0F0F) * 0x01010101  # inclusive sums within the word
    whole = shift(count, 24)  # the word's sum stands in its highest byte
    before = jnp.cumsum(whole, axis=1) - whole
    return (count << 8) + before * 0x01010101


def owner_of(blocks, owner_ref, last_ref, span):
    """Look up the segments of ``blocks``, int32 [N] or a scalar; see `packed_score`."""
    if owner_ref is None:
        return jnp.minimum(blocks // span, last_ref[0])
    return owner_ref[jnp.clip(blocks, 0, owner_ref.shape[0] - 1)]


def check_format(dim: int, *dtypes: DTypeLike) -> None:
    """Raise ``NotImplementedError`` where kernels do not take packed vectors of ``dim`` channels and arrays of ``dtypes``.

    A vector's bitmap must fill whole words. All arrays must have one dtype, whose products with a query's terms are exact.
    """
    if dim not in (32, 64, 128, 256):
        raise NotImplementedError(f"got head_dim {dim}, expected 32, 64, 128 or 256")
    names = {str(jnp.dtype(x)) for x in dtypes}
    if len(names) != 1 or not names <= set(TERMS):
        raise NotImplementedError(f"got dtypes {sorted(names)}, expected one of {list(TERMS)} for all")
