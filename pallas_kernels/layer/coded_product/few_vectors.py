"""Products of one to four vectors with a matrix in 8 or 4 bits as one Pallas Triton kernel, by integer dot products.

A GPU reads so many codes in the time of an instruction that converting each code to a float takes longer than reading it. But
one instruction (dp2a) multiplies two integers of 16 bits with two bytes and adds both products to an int32. So a program
writes the numbers of its vectors as integers of 16 bits times a power of two, their unit, and multiplies codes as they are.
The numbers that 16 bytes of codes multiply, a piece, share a unit: 16 numbers in 8 bits, 32 in 4 bits. A number is rounded by
2^-16 of the largest of its piece at most, and a bfloat16 above 1/128 of the largest is not rounded at all. The sum of a piece
is exact; sums of pieces are in float32.

In 4 bits the low codes of four bytes are multiplied at a time, and then the high codes, which stay in their high bits and so
count 16 times.

What lies between two products of a layer is done in passing, because a launch takes about as long as reading 5 MB. A program
reads whole vectors, so it knows their norm: it multiplies their numbers by the scale of the norm before they become
integers, and the finished products by the factor of the norm. Half of the rows of a program can be gates, and the other half
what they multiply. A residual is added to what is written.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.assembly import assembly
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.formats.coded_matrix import CHUNK, GROUP

MOST_VECTORS = 4
_PIECE = 4  # words of 32 bits, which a thread loads at once
_LANES = 32  # threads of a warp
_WORDS = {8: GROUP // 4, 4: CHUNK // 8}  # of a group in 8 bits, and of a chunk in 4 bits
MANY_ROWS = 16384  # of a matrix: they fill a GPU with larger programs
_FEW_ROWS = 5120  # between the product behind attention and qkv of an 8B model
_MOST_ROWS = 65536  # between gate and up and the head
_LONGEST = 8192  # numbers of a row: between the hidden size and what the product down multiplies
_EXACT = 1.5 * 2.0**23  # a float32 of about this size is a whole number, which its low bits spell
_TOP = 14  # the largest number of a piece is about 2^14 units
_LEAST, _NONE = 15, 255  # exponents of float32: the least whose unit is a normal number, and infinity's and NaN's
# The codes of a word, as bytes: a mask and the type of a byte, for 8 bits and for the low and the high codes of 4 bits.
_BYTES = {8: ((-1, "s32"),), 4: ((0x0F0F0F0F, "u32"), (-0x0F0F0F10, "u32"))}
_PRODUCT = "{{.reg .b32 c, t; and.b32 c, $1, {0}; dp2a.lo.s32.{1} t, $2, c, 0; dp2a.hi.s32.{1} $0, $3, c, t;}}"
_PAIR = "prmt.b32 $0, $1, $2, 0x5410;"  # the low halves of two registers
_FUSED = "fma.rn.f32 $0, $1, $2, $3;"  # Triton within XLA fuses no multiplication with a sum
_HALF = "{{.reg .b16 x, y; mov.b32 {{x, y}}, $1; cvt.f32.f16 $0, {};}}"  # of a register with two float16


def _products(words, pairs, mask, kind, interpret):
    # int32 [N, S]: the sum of the products of a word's four bytes with two pairs of integers [S].
    if not interpret:
        return assembly(_PRODUCT.format(mask, kind), [words, *(jnp.broadcast_to(x[None], words.shape) for x in pairs)])
    found = [(words & mask) >> (8 * place) & 255 for place in range(4)]
    codes = [(x ^ 128) - 128 if kind == "s32" else x for x in found]
    numbers = [(x << shift >> 16)[None] for x in pairs for shift in (16, 0)]
    return sum(code * number for code, number in zip(codes, numbers, strict=True))


def _fused(x, y, z, interpret):
    # x * y + z
    shape = jnp.broadcast_shapes(x.shape, y.shape, z.shape)
    args = [jnp.broadcast_to(a, shape) for a in (x, y, z)]
    return args[0] * args[1] + args[2] if interpret else assembly(_FUSED, args, result=jnp.float32)


def _half(word, odd, interpret):
    # One of the two float16 of a word, as float32.
    if interpret:
        return lax.bitcast_convert_type((word >> (16 * odd)).astype(jnp.int16), jnp.float16).astype(jnp.float32)
    return assembly(_HALF.format("xy"[odd]), [word], result=jnp.float32)


def _pieces(x):
    return x.reshape(*x.shape[:-1], x.shape[-1] // _PIECE, _PIECE)


def _numbers(ref, lead, places):
    # For each place the four bfloat16 numbers from word ``at`` [S] on, float32 [S].
    words = [(ref[*lead, at], ref[*lead, at + 1]) for at in places]
    halves = [[half for word in two for half in (word << 16, word & -65536)] for two in words]
    return [[lax.bitcast_convert_type(half, jnp.float32) for half in four] for four in halves]


def _integers(stored, interpret):
    """Write the numbers that words [S] multiply, four for each word and for each place, float32 [S], in pairs.

    Returns:
        For each place two pairs of integers, int32 [S], and the sum of a piece's numbers, float32 [S / 4]; and the unit of
        each piece, float32 [S / 4], which is NaN if a number is not finite.
    """
    sizes = [lax.bitcast_convert_type(x, jnp.int32) & 0x7FFFFFFF for numbers in stored for x in numbers]
    largest = jnp.max(_pieces(functools.reduce(jnp.maximum, sizes)), axis=-1)
    exponent = jnp.maximum(largest >> 23, _LEAST)
    units = lax.bitcast_convert_type((254 + _TOP - exponent) << 23, jnp.float32)  # how many units are 1
    units = jnp.broadcast_to(units[:, None], (units.shape[0], _PIECE)).reshape(stored[0][0].shape)
    unit = jnp.where(exponent == _NONE, jnp.nan, lax.bitcast_convert_type((exponent - _TOP) << 23, jnp.float32))
    made = []
    for numbers in stored:
        shifted = [_fused(x, units, jnp.full_like(x, _EXACT), interpret) for x in numbers]
        whole = [lax.bitcast_convert_type(x, jnp.int32) for x in shifted]
        pairs = [
            (low & 0xFFFF) | (high << 16) if interpret else assembly(_PAIR, [low, high])
            for low, high in (whole[:2], whole[2:])
        ]
        made.append((pairs, jnp.sum(_pieces(sum(numbers)), axis=-1)))
    return made, unit


def _kernel(*refs, bits, block, span, by_row, eps, gated, residual, interpret):
    # x int32 [B, K / 2]; scale of a norm int32 [K / 2], or none; codes int32 [N, W]; 8 bits: scale [N, G]; 4 bits: scale,
    # minimum int32 [N, G / 2]; residual like out, or none; out [B, N], or with gates [B, N / 2].
    *refs, out_ref = refs
    residual_ref = refs.pop() if residual else None
    least_ref = refs.pop() if bits == 4 else None
    x_ref, *norm_ref, codes_ref, scale_ref = refs
    norm_ref = norm_ref[0] if norm_ref else None
    count, width = out_ref.shape[1], 2 * x_ref.shape[1]
    lane, wide = jnp.arange(block, dtype=jnp.int32), block // 2 if gated else block  # gates come first
    out = pl.program_id(0) * wide + jnp.arange(wide, dtype=jnp.int32)
    safe = jnp.minimum(pl.program_id(0) * wide + lane % wide, count - 1) + lane // wide * count

    def added(i, carried):
        word = i * span + jnp.arange(span, dtype=jnp.int32)
        words = codes_ref[safe[:, None], word[None, :]]
        places = [2 * word]
        if bits == 4:
            first = word // _WORDS[4] * (CHUNK // 2) + word % _WORDS[4] * 2
            places = [first, first + GROUP // 2]
        piece = i * (span // _PIECE) + jnp.arange(span // _PIECE, dtype=jnp.int32)
        at = safe[:, None], (piece * _PIECE // _WORDS[bits])[None, :]
        if bits == 4:
            scales, minima = ([_half(ref[at], odd, interpret) for odd in (0, 1)] for ref in (scale_ref, least_ref))
            scales[1] = scales[1] * (1 / 16)
        else:
            scales, minima = [] if by_row else [scale_ref[at].astype(jnp.float32)], []
        factors = None if norm_ref is None else _numbers(norm_ref, (), places)
        made = []
        for vector, (total, *squares) in enumerate(carried):
            stored = _numbers(x_ref, (vector,), places)
            for x in itertools.chain(*stored):
                squares = [_fused(x, x, square, interpret) for square in squares]
            if factors is not None:
                stored = [[x * y for x, y in zip(*two, strict=True)] for two in zip(stored, factors, strict=True)]
            parts, unit = _integers(stored, interpret)
            products = [
                _products(words, pairs, *each, interpret) for (pairs, _), each in zip(parts, _BYTES[bits], strict=True)
            ]
            sums = [jnp.sum(_pieces(x), axis=-1, dtype=jnp.int32).astype(jnp.float32) for x in products]
            scaled = sums[0] if by_row else sums[0] * scales[0]
            if bits == 4:
                scaled = _fused(sums[1], scales[1], scaled, interpret)
            total = _fused(scaled, unit[None], total, interpret)
            for (_, number), least in zip(parts, minima, strict=bits == 4):
                total = _fused(number[None], least, total, interpret)
            made.append((total, *squares))
        return tuple(made)

    none = jnp.zeros((block, span // _PIECE), jnp.float32)
    none = (none,) if norm_ref is None else (none, jnp.zeros((span,), jnp.float32))
    steps, none = codes_ref.shape[1] // span, (none,) * x_ref.shape[0]
    for vector, (total, *squares) in enumerate(added(0, none) if steps == 1 else lax.fori_loop(0, steps, added, none)):
        made = jnp.sum(total, axis=-1)
        if by_row:
            made = made * scale_ref[safe, 0].astype(jnp.float32)
        if squares:
            made = made * lax.rsqrt(jnp.sum(squares[0]) / width + eps)
        if gated:
            both, first = made.reshape(2, wide), jnp.arange(2)[:, None] == 0
            gate, other = (jnp.sum(jnp.where(first == which, both, 0), axis=0) for which in (True, False))
            made = gate / (1 + jnp.exp(-gate)) * other
        if residual:
            made = made + residual_ref[vector, jnp.minimum(out, count - 1)].astype(jnp.float32)
        plt.store(out_ref.at[vector, out], made.astype(out_ref.dtype), mask=out < count)


def _for_one_vector(bits, rows, width):
    # Rows of a program, words of a step and warps.
    if width > _LONGEST:
        return 8, 512 if bits == 8 else 256, 8
    if rows >= _MOST_ROWS:
        return 8, 1024 if bits == 8 else 256, 4
    if rows >= MANY_ROWS:
        return 16, 256, 8
    if bits == 8:
        return 4 if rows < _FEW_ROWS else 8, 512, 4
    return 8 if rows < _FEW_ROWS else 16, 256, 8


def sizes(vectors: int, bits: int, rows: int, width: int) -> dict[str, int]:
    """Return the rows of a program, the words of a step and the warps for a matrix of ``rows`` rows of ``width`` numbers.

    For one vector they were the fastest in whole steps of an 8B model on an H200. For two to four vectors they were the
    fastest in single products on an H100 (docs/notebook/weights.md).
    """
    if vectors > 1:
        block, span = (16, 256) if vectors == 2 else (32, 128)
        return {"block": block, "span": span, "num_warps": 4}
    block, span, warps = _for_one_vector(bits, rows, width)
    narrow = block * math.gcd(span, width * bits // 32) < warps * _LANES * _PIECE  # no piece for each thread
    return {"block": block, "span": span, "num_warps": 4 if narrow else warps}


_STATIC = ("dtype", "eps", "gated", "block", "span", "num_warps", "interpret")


@functools.partial(jax.jit, static_argnames=_STATIC)
def coded_product(
    x, matrix, scale, residual, *, dtype, eps, gated, block: int, span: int, num_warps: int = 4, interpret=False
):
    """Multiply x [B, K] with a matrix of one axis N, ``block`` rows of it per program, ``span`` words at a time: [B, N].

    Equal calls of a program are one call under `jax.jit`: they are lowered once.
    """
    count, bits = matrix.codes.shape[0], matrix.bits
    words = lax.bitcast_convert_type(matrix.codes.reshape(count, -1, 4), jnp.int32)
    parts = [matrix.scales]
    if bits == 4:
        minima = jnp.zeros_like(matrix.scales) if matrix.minima is None else matrix.minima
        halves = (part.astype(jnp.float16).reshape(count, -1, 2) for part in (matrix.scales, minima))
        parts = [lax.bitcast_convert_type(part, jnp.int32) for part in halves]
    vectors = [lax.bitcast_convert_type(a.reshape(*a.shape[:-1], -1, 2), jnp.int32) for a in (x, scale) if a is not None]
    operands = [*vectors, words, *parts, *([] if residual is None else [residual])]
    kernel = functools.partial(
        _kernel, bits=bits, block=block, span=math.gcd(span, words.shape[1]), by_row=matrix.by_row, eps=eps, gated=gated,
        residual=residual is not None, interpret=interpret,
    )  # fmt: skip
    return triton_call(
        kernel,
        grid=(pl.cdiv(count, block),),
        out_shape=jax.ShapeDtypeStruct((len(x), count // 2 if gated else count), dtype),
        num_warps=num_warps,
        interpret=interpret,
        name=f"coded_product_{bits}",
    )(*operands)
