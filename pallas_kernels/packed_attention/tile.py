"""Packed vectors inside a kernel: their products with queries, and a tile of them unpacked.

Products: a vector per thread, which walks through the r bits that are set and reads, for each, the entries of all query heads
at that channel, 16 bytes for four heads, from a table that stays in the first-level cache. That is some 25 instructions per
kept value where unpacking takes 10 per channel, kept or not; nothing is exchanged between threads, and bitmap and values are
read at once, in loads of 16 bytes.

Unpacking, for attention, where the products above were slower: a program reads the bitmaps of a tile of vectors once, a
vector per thread, and counts the bits before every byte with a few operations on whole words. Then 16 threads (D = 128) share
a vector, one byte of its bitmap each: channel j of a byte is the value behind as many others as there are bits before its
own, read from the cache line that its neighbours read too. The eight channels of a thread lie next to each other, as a matrix
product wants them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


def query_table(parts: jax.Array) -> jax.Array:
    """Turned queries [B, H, M, G, N, D] as `product_tile` reads them: float32 [B * H, M * D * Gp], heads padded to Gp.

    An XLA computation of a few KiB.
    """
    rows, heads, _, group, terms, _ = parts.shape
    # Slices and a stack, not a sum and a transposition: those become two kernels.
    query = [sum(parts[..., g, n, :].astype(jnp.float32) for n in range(terms)) for g in range(group)]
    query += [jnp.zeros_like(query[0])] * (pl.next_power_of_2(group) - group)
    return jnp.stack(query, axis=-1).reshape(rows * heads, -1)


def product_tile(
    table_ref: Any, values_ref: Any, words_ref: Any, row: jax.Array, first: jax.Array, group: int
) -> jax.Array:
    """Products of vectors ``row`` int32 [N] with ``group`` queries (a power of two): float32 [N, group].

    Args:
        table_ref: float32 [channels of all segments * group], see `query_table`.
        values_ref: [S * r]; what follows the values of a vector's bits is zero.
        words_ref: int32 [S, D/32]. Channel c is bit ``c % 32`` of word ``c // 32``.
        row: in range. As many as there are threads is best.
        first: int32 [N], channel of the table where the vector's segment begins.
        group: heads of the table.
    """
    words = words_ref[row, :]
    number, per_vector = words.shape
    rank = values_ref.shape[0] // words_ref.shape[0]
    word = [_column(words, k) for k in range(per_vector)]
    begin = [jnp.zeros_like(row)]  # values before each word
    for k in range(1, per_vector):
        begin.append(begin[-1] + lax.population_count(word[k - 1]))
    size = min(8, pl.next_power_of_2(rank))  # of a load
    bits = jnp.int16 if values_ref.dtype.itemsize == 2 else jnp.int32
    values = []
    for i in range(0, rank, size):
        at = i + jnp.arange(size, dtype=jnp.int32)
        at = at if i + size <= rank else jnp.minimum(at, rank - 1)
        at = jnp.broadcast_to(row[:, None] * rank, (number, size)) + at[None]
        values.append(lax.bitcast_convert_type(plt.load(values_ref.at[at]), bits))
    heads = jnp.broadcast_to(jnp.arange(group, dtype=jnp.int32)[None], (number, group))
    first = first * group
    left, base = word[0], first
    total = jnp.zeros((number, group), jnp.float32)
    for i in range(rank):
        for k in range(1, per_vector):  # of words that begin at the same value, all but the last are empty
            here = begin[k] == i
            left, base = jnp.where(here, word[k], left), jnp.where(here, first + 32 * k * group, base)
        below = left - 1
        # The lowest bit that is left; the last of the word if there is none.
        entry = pl.multiple_of(base + group * lax.population_count(~left & below & 0x7FFFFFFF), group)
        left = left & below
        value = lax.bitcast_convert_type(_column(values[i // size], i % size), values_ref.dtype).astype(jnp.float32)
        query = plt.load(table_ref.at[jnp.broadcast_to(entry[:, None], heads.shape) + heads])
        total = total + value[:, None] * query
    return total


def _column(x: jax.Array, at: int) -> jax.Array:
    """Column ``at`` of integers [N, C]: where a thread has whole rows this is the name of a register."""
    number = jnp.broadcast_to(jnp.arange(x.shape[1], dtype=jnp.int32)[None], x.shape)
    return jnp.sum(jnp.where(number == at, x, jnp.zeros_like(x)), axis=1, dtype=x.dtype)


def unpack_tile(values_ref: Any, words: jax.Array, row: jax.Array, rank: int) -> jax.Array:
    """Vectors ``row`` int32 [N] of values [S * r], whose bitmaps are ``words`` int32 [N, D/32]: [N, D] in their dtype.

    N and D are powers of two, ``row`` is in range. Channel c is bit ``c % 32`` of word ``c // 32``.
    """
    number, per_vector = words.shape
    each = jnp.broadcast_to(8 * jnp.arange(4, dtype=jnp.int32)[None, None], (number, per_vector, 4))

    def byte_of(x: jax.Array) -> jax.Array:  # the four bytes of every word, int32 [N, D/8]; higher bits may be set
        x = jnp.broadcast_to(x[:, :, None], each.shape)
        return lax.shift_right_logical(x, each).reshape(number, -1)

    bits = byte_of(words)
    index = jnp.broadcast_to(row[:, None] * rank, bits.shape) + (byte_of(_bits_before(words)) & 255)
    channels = []
    for j in range(8):
        kept = (bits & (1 << j)) != 0
        value = plt.load(values_ref.at[index], mask=kept, other=0)
        channels.append(value)
        index = index + kept.astype(jnp.int32)
    for half in (4, 2, 1):
        channels = [jnp.stack([channels[j], channels[j + half]], axis=-1) for j in range(half)]
    return channels[0].reshape(number, -1)


def _bits_before(words: jax.Array) -> jax.Array:
    """How many bits are set in front of every byte of a row of words int32 [N, W], as four bytes to a word."""
    shift = lax.shift_right_logical
    count = words - (shift(words, 1) & 0x55555555)
    count = (count & 0x33333333) + (shift(count, 2) & 0x33333333)
    count = ((count + shift(count, 4)) & 0x0F0F0F0F) * 0x01010101  # inclusive sums within the word
    whole = shift(count, 24)
    before = jnp.cumsum(whole, axis=1) - whole
    return (count << 8) + before * 0x01010101
