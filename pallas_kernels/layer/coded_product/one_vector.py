"""Products of one to four vectors with a matrix in 8 or 4 bits, by integer dot products, as one Pallas Triton kernel.

With one vector, memory gives an H200 a byte of codes for each six instructions that it can issue, and a conversion of each code to
a float takes too many of them. GPUs have an instruction that multiplies two numbers of 16 bits with two bytes and adds both
products to an int32. So the numbers of a vector are written as integers of 16 bits times a power of two, which all numbers
of a piece share: the 16 numbers that one load of 16 bytes multiplies. A number is rounded by 2^-16 of the largest of its
piece at most, and a number in bfloat16 that is above 1/128 of the largest is not rounded at all. Codes are not converted; sums
of a piece are exact, and sums of pieces are in float32.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.assembly import assembly
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt

MOST_VECTORS = 4
PIECE = 4  # words of 32 bits of a piece, which a thread loads at once
_CHUNK_WORDS = 8  # words of a chunk in 4 bits
_LOW = 0x0F0F0F0F
_EXACT = 1.5 * 2.0**23  # a float32 of this size has the units of an integer
_TOP = 14  # the largest number of a piece is about 2^14
_LEAST, _NONE = 15, 255  # exponents of float32: the least whose power is a normal number, and infinity's
_PRODUCT = "{{.reg .b32 c, t; and.b32 c, $1, {0}; dp2a.lo.s32.{1} t, $2, c, 0; dp2a.hi.s32.{1} $0, $3, c, t;}}"
# The bits of a word that are its four codes, of which the high bits stay where they are: 16 times the code.
_CODES = {None: (-1, "s32"), 0: (_LOW, "u32"), 1: (_LOW << 4, "u32")}
_FMA = "fma.rn.f32 $0, $1, $2, $3;"  # Triton within XLA fuses no multiplication with a sum
_HALF = "{{.reg .b16 x, y; mov.b32 {{x, y}}, $1; cvt.f32.f16 $0, {};}}"  # of a register with two float16
_BOTH = "prmt.b32 $0, $1, $2, 0x5410;"  # the low halves of two registers


def _products(words, pair, place, interpret):
    # The sums int32 of the products of a word's four codes with two pairs of numbers.
    if not interpret:
        args = [words, *(jnp.broadcast_to(x[None], words.shape) for x in pair)]
        return assembly(_PRODUCT.format(*_CODES[place]), args)
    codes = [(words << (24 - 8 * byte)) >> 24 for byte in range(4)]
    if place is not None:
        codes = [code & (15 << (4 * place)) for code in codes]
    numbers = [(x << shift >> 16)[None] for x in pair for shift in (16, 0)]
    return sum(code * number for code, number in zip(codes, numbers, strict=True))


def _both(low, high, interpret):
    return (low & 0xFFFF) | (high << 16) if interpret else assembly(_BOTH, [low, high])


def _fma(x, y, z, interpret):
    shape = jnp.broadcast_shapes(x.shape, y.shape, z.shape)
    args = [jnp.broadcast_to(a, shape) for a in (x, y, z)]
    return args[0] * args[1] + args[2] if interpret else assembly(_FMA, args, result=jnp.float32)


def _half(word, odd, interpret):
    # One of the two float16 of a word.
    if interpret:
        return lax.bitcast_convert_type((word >> (16 * odd)).astype(jnp.int16), jnp.float16).astype(jnp.float32)
    return assembly(_HALF.format("xy"[odd]), [word], result=jnp.float32)


def _floats(word):
    # The two bfloat16 of a word as float32.
    return tuple(lax.bitcast_convert_type(x, jnp.float32) for x in (word << 16, word & -65536))


def _pieces(x):
    return x.reshape(*x.shape[:-1], x.shape[-1] // PIECE, PIECE)


def _integers(x_ref, vector, places, interpret):
    """Read the numbers that words [S] multiply, four for each word and place.

    Returns:
        For each place two pairs of integers int32 [S], and the sum of a piece's numbers [S / 4]; the unit [S / 4] of both.
    """
    both = [[x_ref[vector, at], x_ref[vector, at + 1]] for at in places]
    most = functools.reduce(jnp.maximum, [half & 0x7FFF for words in both for x in words for half in (x, x >> 16)])
    exponent = jnp.maximum(jnp.max(_pieces(most), axis=-1) >> 7, _LEAST)
    up = lax.bitcast_convert_type((254 + _TOP - exponent) << 23, jnp.float32)
    up = jnp.broadcast_to(up[:, None], (up.shape[0], PIECE)).reshape(places[0].shape)
    unit = lax.bitcast_convert_type((exponent - _TOP) << 23, jnp.float32)
    unit = jnp.where(exponent == _NONE, jnp.nan, unit)  # no integer stands for infinity or NaN
    made = []
    for words in both:
        numbers = [_floats(x) for x in words]
        whole = [
            [lax.bitcast_convert_type(_fma(x, up, jnp.full_like(x, _EXACT), interpret), jnp.int32) for x in two]
            for two in numbers
        ]
        total = jnp.sum(_pieces(sum(x for two in numbers for x in two)), axis=-1)
        made.append(([_both(*two, interpret) for two in whole], total))
    return made, unit


def _kernel(x_ref, codes_ref, scale_ref, *refs, block, span, tiles, ahead, by_row, nibbles, interpret):
    # x int32 [B, K / 2], codes int32 [N, W], scale [N, G], in 4 bits a minimum [N, G]; out [B, N].
    least_ref, out_ref = refs if nibbles else (None, *refs)
    vectors, steps, count = x_ref.shape[0], codes_ref.shape[1] // span, codes_ref.shape[0]
    places, program = (0, 1) if nibbles else (None,), pl.program_id(0)

    def rows(tile):
        return (program * tiles + tile) * block + jnp.arange(block, dtype=jnp.int32)

    def read(tile, i):
        row = jnp.minimum(rows(tile), count - 1)
        return codes_ref[row[:, None], (i * span + jnp.arange(span, dtype=jnp.int32))[None, :]]

    def prepared(i):
        word = i * span + jnp.arange(span, dtype=jnp.int32)
        at = [word // _CHUNK_WORDS * 32 + 16 * place + word % _CHUNK_WORDS * 2 for place in (0, 1)] if nibbles else [2 * word]
        return [_integers(x_ref, vector, at, interpret) for vector in range(vectors)]

    def added(totals, tile, i, words, numbers):
        row = jnp.minimum(rows(tile), count - 1)[:, None]
        piece = (i * (span // PIECE) + jnp.arange(span // PIECE, dtype=jnp.int32))[None]
        if nibbles:  # a word of two scales, and a word of two minima, for each chunk
            both = [ref[row, piece * PIECE // _CHUNK_WORDS] for ref in (scale_ref, least_ref)]
            factors = [[_half(words, place, interpret) for words in both] for place in places]
            factors[1][0] = factors[1][0] * (1 / 16)  # the codes in the high bits are 16 times as large
        elif not by_row:
            factors = [[scale_ref[row, piece // 2].astype(jnp.float32)]]
        made = []
        for total, (parts, unit) in zip(totals, numbers, strict=True):
            sums = [
                jnp.sum(_pieces(_products(words, pair, place, interpret)), axis=-1, dtype=jnp.int32).astype(jnp.float32)
                for place, (pair, _) in zip(places, parts, strict=True)
            ]
            if by_row:
                scaled = sums[0]
            else:
                scaled = sums[0] * factors[0][0]
            if nibbles:
                scaled = _fma(sums[1], factors[1][0], scaled, interpret)
                for (_, whole), (_, least) in zip(parts, factors, strict=True):
                    total = _fma(whole[None], least, total, interpret)
            total = _fma(scaled, unit[None], total, interpret)
            made.append(total)
        return tuple(made)

    def store(totals, tile):
        row = rows(tile)
        for vector, total in enumerate(totals):
            made = jnp.sum(total, axis=-1)
            if by_row:
                made = made * scale_ref[jnp.minimum(row, count - 1), 0].astype(jnp.float32)
            plt.store(out_ref.at[vector, row], made.astype(out_ref.dtype), mask=row < count)

    none = (jnp.zeros((block, span // PIECE), jnp.float32),) * vectors
    if steps == 1:
        words, numbers = read(0, 0), prepared(0)
        if tiles == 1:
            store(added(none, 0, 0, words, numbers), 0)
        elif ahead:
            def each(tile, words):
                following = read(tile + 1, 0)
                store(added(none, tile, 0, words, numbers), tile)
                return following

            lax.fori_loop(0, tiles, each, words)
        else:
            def alone(tile, _):
                store(added(none, tile, 0, read(tile, 0), numbers), tile)
                return 0

            lax.fori_loop(0, tiles, alone, 0)
        return
    for tile in range(tiles):
        if ahead:
            def step(i, carry, tile=tile):
                totals, words = carry
                following = read(tile, i + 1)
                return added(totals, tile, i, words, prepared(i)), following

            totals, words = lax.fori_loop(0, steps - 1, step, (none, read(tile, 0)))
            totals = added(totals, tile, steps - 1, words, prepared(steps - 1))
        else:
            totals = lax.fori_loop(
                0, steps, lambda i, totals, tile=tile: added(totals, tile, i, read(tile, i), prepared(i)), none
            )
        store(totals, tile)


@functools.partial(jax.jit, static_argnames=("dtype", "block", "span", "num_warps", "num_stages", "tiles", "ahead", "interpret"))
def coded_product(
    x, matrix, *, dtype, block=16, span=512, num_warps=4, num_stages=2, tiles=1, ahead=False, interpret=False
):
    """Multiply x [B, K] of up to `MOST_VECTORS` rows with a flat matrix: [B, N]."""
    count, width = matrix.codes.shape[0], matrix.width
    words = lax.bitcast_convert_type(matrix.codes.reshape(count, -1, 4), jnp.int32)
    halves = lax.bitcast_convert_type(x.reshape(len(x), -1, 2), jnp.int32)
    nibbles = matrix.bits == 4
    operands = [halves, words, matrix.scales]
    if nibbles:
        minima = jnp.zeros_like(matrix.scales) if matrix.minima is None else matrix.minima
        operands[2:] = [lax.bitcast_convert_type(part.astype(jnp.float16).reshape(count, -1, 2), jnp.int32) for part in (matrix.scales, minima)]
    span = math.gcd(span, words.shape[1])
    kernel = functools.partial(
        _kernel, block=block, span=span, tiles=tiles, ahead=ahead, by_row=matrix.by_row, nibbles=nibbles, interpret=interpret
    )
    return triton_call(
        kernel,
        grid=(pl.cdiv(count, block * tiles),),
        out_shape=jax.ShapeDtypeStruct((len(x), count), dtype),
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpret,
        name=f"coded_product_{matrix.bits}",
    )(*operands)
