"""Vectors as integers of 16 bits: what a kernel before a product with codes writes, see `formats.prepared.Prepared`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.assembly import assembly
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.formats.coded_matrix import CHUNK, GROUP
from pallas_kernels.formats.prepared import integer_shapes

PIECE = 4  # words of 32 bits, which a thread loads at once
CHUNK_WORDS = CHUNK // 8  # words of codes of a chunk in 4 bits
_EXACT = 1.5 * 2.0**23  # a float32 of about this size is a whole number, which its low bits spell
_TOP = 14  # the largest number of a piece is about 2^14 units
_LEAST, _NONE = 15, 255  # exponents of float32: the least whose unit is a normal number, and infinity's and NaN's
_BLOCK = 128  # words of a program
_FUSED = "fma.rn.f32 $0, $1, $2, $3;"  # Triton within XLA fuses no multiplication with a sum


def fused(x: jax.Array, y: jax.Array, z: jax.Array, interpret: bool) -> jax.Array:
    """Compute x * y + z in float32 in one instruction."""
    shape = jnp.broadcast_shapes(x.shape, y.shape, z.shape)
    args = [jnp.broadcast_to(a, shape) for a in (x, y, z)]
    return args[0] * args[1] + args[2] if interpret else assembly(_FUSED, args, result=jnp.float32)


def pieces_of(x: jax.Array) -> jax.Array:
    """Reshape [..., S] to [..., S / 4, 4]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // PIECE, PIECE)


def places(word: jax.Array, bits: int) -> list[jax.Array]:
    """Find the numbers that ``word`` int32 [S] multiplies, in a vector of pairs of bfloat16: two or four int32 [S]."""
    if bits == 8:
        return [2 * word, 2 * word + 1]
    first = word // CHUNK_WORDS * (CHUNK // 2) + word % CHUNK_WORDS * 2
    return [first, first + 1, first + GROUP // 2, first + GROUP // 2 + 1]


def numbers_of(pair: jax.Array) -> list[jax.Array]:
    """Unpack two bfloat16 from int32 [S]: float32 [S] each."""
    return [lax.bitcast_convert_type(x, jnp.float32) for x in (pair << 16, pair & -65536)]


def pair_of(low: jax.Array, high: jax.Array) -> jax.Array:
    """Pack two float32 [S] that are bfloat16 numbers into int32 [S]."""
    low, high = (lax.bitcast_convert_type(x, jnp.int32) for x in (low, high))
    return ((low >> 16) & 0xFFFF) | (high & -65536)


def rounded(numbers: list[jax.Array]) -> list[jax.Array]:
    """Round float32 to bfloat16, and return float32."""
    return [x.astype(jnp.bfloat16).astype(jnp.float32) for x in numbers]


def write(
    numbers: list[jax.Array], pairs_ref: Any, pieces_ref: Any, vector: jax.Array, word: jax.Array, interpret: bool
) -> None:
    """Write the integers of one vector, within a kernel.

    Args:
        numbers: float32 [S], four for the low codes of each word, and in 4 bits four for its high codes; 0 past the end.
        pairs_ref: all pairs.
        pieces_ref: all pieces.
        vector: int32 scalar, which vector it is.
        word: int32 [S], ascending, from a multiple of `PIECE` on.
        interpret: whether the kernel is interpreted.
    """
    size = functools.reduce(jnp.maximum, [jnp.abs(x) for x in numbers])
    largest = jnp.max(pieces_of(lax.bitcast_convert_type(size, jnp.int32)), axis=-1)
    exponent = jnp.maximum(largest >> 23, _LEAST)
    units = lax.bitcast_convert_type((254 + _TOP - exponent) << 23, jnp.float32)  # how many units are 1
    units = jnp.broadcast_to(units[:, None], (units.shape[0], PIECE)).reshape(word.shape)
    unit = jnp.where(exponent == _NONE, jnp.nan, lax.bitcast_convert_type((exponent - _TOP) << 23, jnp.float32))
    piece = jnp.min(pieces_of(word), axis=-1) // PIECE
    inside, whole_pieces = word < pairs_ref.shape[2], piece < pieces_ref.shape[2]
    plt.store(pieces_ref.at[vector, 0, piece], unit, mask=whole_pieces)
    for place in range(len(numbers) // 4):
        four = numbers[4 * place : 4 * place + 4]
        shifted = [fused(x, units, jnp.full_like(x, _EXACT), interpret) for x in four]
        whole = [lax.bitcast_convert_type(x, jnp.int32) for x in shifted]
        for j in (0, 1):
            pair = (whole[2 * j] & 0xFFFF) | (whole[2 * j + 1] << 16)
            plt.store(pairs_ref.at[vector, 2 * place + j, word], pair, mask=inside)
        if len(numbers) > 4:
            total = jnp.sum(pieces_of(sum(four)), axis=-1)
            plt.store(pieces_ref.at[vector, 1 + place, piece], total, mask=whole_pieces)


def _kernel(x_ref, pairs_ref, pieces_ref, *, bits, gated, interpret):
    # x int32 [B, K / 2], or [B, K] where it has gates and then numbers.
    word = pl.program_id(1) * _BLOCK + jnp.arange(_BLOCK, dtype=jnp.int32)
    vector, inside = pl.program_id(0), word < pairs_ref.shape[2]
    numbers = []
    for at in places(word, bits):
        two = numbers_of(plt.load(x_ref.at[vector, at], mask=inside, other=0))
        if gated:
            factors = numbers_of(plt.load(x_ref.at[vector, at + x_ref.shape[1] // 2], mask=inside, other=0))
            two = rounded([x / (1 + jnp.exp(-x)) * y for x, y in zip(two, factors, strict=True)])
        numbers += two
    write(numbers, pairs_ref, pieces_ref, vector, word, interpret)


@functools.partial(jax.jit, static_argnames=("bits", "gated", "interpret"))
def integers_of(x: jax.Array, *, bits: int, gated: bool = False, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Write vectors x, bfloat16 [B, K], as integers that codes in 8 or 4 bits multiply: pairs and pieces.

    With ``gated`` x is [B, 2 K], and the vectors are silu(first half) * second half, rounded to bfloat16.
    """
    width = x.shape[1] // (2 if gated else 1)
    out = integer_shapes(len(x), width, bits)
    return triton_call(
        functools.partial(_kernel, bits=bits, gated=gated, interpret=interpret),
        grid=(len(x), pl.cdiv(out[0].shape[2], _BLOCK)),
        out_shape=out,
        interpret=interpret,
        name="vector_integers",
    )(lax.bitcast_convert_type(x.reshape(len(x), -1, 2), jnp.int32))
