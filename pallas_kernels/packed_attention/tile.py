"""Unpack a tile of packed vectors inside a kernel: kept channels at their places, zeros elsewhere.

A program reads the bitmaps of a tile of vectors once, a vector per thread, and counts the bits before every byte with a few
operations on whole words. Then 16 threads (D = 128) share a vector, one byte of its bitmap each: channel j of a byte is
the value behind as many others as there are bits before its own, read from the cache line that its neighbours read too. That
is about eight instructions per channel, and the eight channels of a thread lie next to each other, as a matrix product wants
them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt


def unpack_tile(values_ref: Any, words_ref: Any, row: jax.Array) -> jax.Array:
    """Vectors ``row`` int32 [N] of values [S * r] and bitmap words int32 [S, D/32]: [N, D] in the dtype of the values.

    N and D are powers of two, ``row`` is in range. Channel c is bit ``c % 32`` of word ``c // 32``.
    """
    words = words_ref[row, :]
    number, per_vector = words.shape
    each = jnp.broadcast_to(8 * jnp.arange(4, dtype=jnp.int32)[None, None], (number, per_vector, 4))

    def byte_of(x: jax.Array) -> jax.Array:  # the four bytes of every word, int32 [N, D/8]; higher bits may be set
        x = jnp.broadcast_to(x[:, :, None], each.shape)
        return lax.shift_right_logical(x, each).reshape(number, -1)

    bits = byte_of(words)
    rank = values_ref.shape[0] // words_ref.shape[0]
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
