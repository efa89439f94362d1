"""Products of one to four vectors with a matrix in 8 or 4 bits, by integer dot products: two Pallas Triton kernels.

A GPU reads so many codes in the time of an instruction that converting each code to a float takes longer than reading it. But
one instruction (dp2a) multiplies two integers of 16 bits with two bytes and adds both products to an int32. So a first,
small kernel writes the vectors as integers (`integers`), and the second multiplies codes as they are. The sum of a piece is
exact; sums of pieces are in float32.

In 4 bits the low codes of four bytes are multiplied at a time, and then the high codes, which stay in their high bits and so
count 16 times.

A thread of the second kernel has four neighbouring words of several rows. All that it reads and computes for them stays in
its registers: a kernel in which Triton moves an array through shared memory has barriers in its loop, and was twice as slow.
That is why a program's words are four for each of its threads, and why nothing is computed on the vector there.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.assembly import assembly
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.formats.coded_matrix import GROUP
from pallas_kernels.layer.coded_product.integers import CHUNK_WORDS, PIECE, fused, pieces_of

SHORT = 4096  # numbers of a row, which four warps read at once in 4 bits
MANY_ROWS = 16384  # of a matrix: they fill a GPU with larger programs
_THREADS = 32  # of a warp
_WORDS = {8: GROUP // 4, 4: CHUNK_WORDS}  # of a group in 8 bits, and of a chunk in 4 bits
# The codes of a word, as bytes: a mask and the type of a byte, for 8 bits and for the low and the high codes of 4 bits.
_BYTES = {8: ((-1, "s32"),), 4: ((0x0F0F0F0F, "u32"), (-0x0F0F0F10, "u32"))}
_HALF = "{{.reg .b16 x, y; mov.b32 {{x, y}}, $1; cvt.f32.f16 $0, {};}}"  # of a register with two float16
_WORD = "and.b32 c, ${word}, {mask}; dp2a.lo.s32.{kind} s, ${low}, c, s; dp2a.hi.s32.{kind} s, ${high}, c, s;"


@functools.cache
def _products_of_a_piece(mask: int, kind: str, started: bool) -> str:
    # The sum is the first of four results, and the others are 0: assembly has as many results as operands.
    words = (_WORD.format(word=4 + k, low=8 + k, high=12 + k, mask=mask, kind=kind) for k in range(PIECE))
    rest = "mov.b32 $0, s; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
    return f"{{.reg .b32 c, s; mov.b32 s, {'$16' if started else '0'}; {' '.join(words)} {rest}}}"


def _products(words, pairs, start, mask, kind, interpret):
    """Sum the products of each piece's bytes with two pairs of integers [S]: int32 [N, S / 4].

    The sum begins with ``start``, which is subtracted again, if it is given: then the compiler cannot read it later than
    the codes. Left alone it reads scales when it needs them, and a thread waits for memory twice in a step.
    """
    if interpret:
        found = [(words & mask) >> (8 * place) & 255 for place in range(4)]
        codes = [(x ^ 128) - 128 if kind == "s32" else x for x in found]
        numbers = [(x << shift >> 16)[None] for x in pairs for shift in (16, 0)]
        made = sum(code * number for code, number in zip(codes, numbers, strict=True))
        return jnp.sum(pieces_of(made), axis=-1, dtype=jnp.int32)
    args = [words, *(jnp.broadcast_to(x[None], words.shape) for x in pairs)]
    if start is not None:
        args.append(jnp.broadcast_to(start[..., None], (*start.shape, PIECE)).reshape(words.shape))
    made = assembly(_products_of_a_piece(mask, kind, start is not None), args, pack=PIECE)
    made = jnp.sum(pieces_of(made), axis=-1, dtype=jnp.int32)
    return made if start is None else made - start


def _half(word, odd, interpret):
    # One of the two float16 of a word, as float32.
    if interpret:
        return lax.bitcast_convert_type((word >> (16 * odd)).astype(jnp.int16), jnp.float16).astype(jnp.float32)
    return assembly(_HALF.format("xy"[odd]), [word], result=jnp.float32)


def _read(ref, at, end):
    # The last of the indices is along words or pieces; past their end there are zeros, where a last step reads so far.
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in at))
    at = tuple(jnp.broadcast_to(x, shape) for x in at)
    return plt.load(ref.at[at], mask=at[-1] < end, other=0)


def _kernel(pairs_ref, pieces_ref, codes_ref, scale_ref, *refs, bits, block, span, ahead, by_row, interpret):
    # pairs, pieces: see `Prepared`; codes int32 [N, W]; 8 bits: scale [N, G]; 4 bits: scale, minimum int32 [N, G / 2];
    # out [B, N].
    least_ref, out_ref = refs if bits == 4 else (None, *refs)
    row = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    safe, width = jnp.minimum(row, codes_ref.shape[0] - 1), codes_ref.shape[1]
    read = _read if width % span else lambda ref, at, end: ref[at]
    step_word, step_piece = (jnp.arange(n, dtype=jnp.int32) for n in (span, span // PIECE))

    def matrix(i):
        # What a step multiplies: its words, and scales and minima of its pieces.
        words = read(codes_ref, (safe[:, None], (i * span + step_word)[None]), width)
        piece = i * (span // PIECE) + step_piece
        at = safe[:, None], (piece * PIECE // _WORDS[bits])[None]
        refs = [] if by_row else [scale_ref] if bits == 8 else [scale_ref, least_ref]
        return words, *(read(ref, at, width // _WORDS[bits]) for ref in refs)

    def added(i, total, vector, words, *stored):
        pairs = [read(pairs_ref, (vector, k, i * span + step_word), width) for k in range(pairs_ref.shape[1])]
        piece = i * (span // PIECE) + step_piece
        unit, *numbers = (
            read(pieces_ref, (vector, k, piece), width // PIECE)[None] for k in range(pieces_ref.shape[1])
        )
        starts = stored if bits == 4 else [None]
        low, *high = (
            _products(words, pairs[2 * k : 2 * k + 2], start, *_BYTES[bits][k], interpret).astype(jnp.float32)
            for k, start in enumerate(starts)
        )
        if bits == 8:
            return fused(low if by_row else low * stored[0].astype(jnp.float32), unit, total, interpret)
        scales, minima = ([_half(x, odd, interpret) for odd in (0, 1)] for x in stored)
        scaled = fused(high[0], scales[1] * (1 / 16), low * scales[0], interpret)
        total = fused(scaled, unit, total, interpret)
        for number, least in zip(numbers, minima, strict=True):
            total = fused(number, least, total, interpret)
        return total

    def all_added(i, totals, held):
        return tuple(added(i, total, vector, *held) for vector, total in enumerate(totals))

    steps, totals = pl.cdiv(width, span), (jnp.zeros((block, span // PIECE), jnp.float32),) * pairs_ref.shape[0]
    ahead = min(ahead, steps - 1)
    held = [matrix(i) for i in range(ahead)]

    def body(i, carry):
        totals, held = carry
        held = [*held, matrix(i + ahead)]
        return all_added(i, totals, held[0]), held[1:]

    totals, held = lax.fori_loop(0, steps - ahead, body, (totals, held)) if steps > 1 else body(0, (totals, held))
    for i, each in enumerate(held):
        totals = all_added(steps - ahead + i, totals, each)
    for vector, total in enumerate(totals):
        made = jnp.sum(total, axis=-1)
        if by_row:
            made = made * scale_ref[safe, 0].astype(jnp.float32)
        plt.store(out_ref.at[vector, row], made.astype(out_ref.dtype), mask=row < codes_ref.shape[0])


def sizes(vectors: int, bits: int, rows: int, width: int) -> dict[str, int]:
    """Return the rows of a program, its warps, and the steps that it reads ahead, that were fastest on an H200."""
    if vectors > 1:
        return {"block": 4, "num_warps": 4, "ahead": 0}
    if bits == 8:
        return {"block": 4, "num_warps": 4, "ahead": 1}
    if width > SHORT:
        return {"block": 4, "num_warps": 8, "ahead": 0}
    return {"block": 8 if rows >= MANY_ROWS else 4, "num_warps": 4, "ahead": 0}


@functools.partial(jax.jit, static_argnames=("dtype", "block", "num_warps", "ahead", "interpret"))
def coded_product(pairs, pieces, matrix, *, dtype, block: int, num_warps: int, ahead: int, interpret=False):
    """Multiply prepared vectors with a matrix of one axis N, ``block`` rows of it per program: [B, N].

    Equal calls are one call under `jax.jit`: they are lowered once.
    """
    count, bits = matrix.codes.shape[0], matrix.bits
    words = lax.bitcast_convert_type(matrix.codes.reshape(count, -1, 4), jnp.int32)
    operands = [pairs, pieces, words, matrix.scales]
    if bits == 4:
        minima = jnp.zeros_like(matrix.scales) if matrix.minima is None else matrix.minima
        halves = (part.astype(jnp.float16).reshape(count, -1, 2) for part in (matrix.scales, minima))
        operands[3:] = (lax.bitcast_convert_type(part, jnp.int32) for part in halves)
    kernel = functools.partial(
        _kernel,
        bits=bits,
        block=block,
        span=_THREADS * num_warps * PIECE,
        ahead=ahead,
        by_row=matrix.by_row,
        interpret=interpret,
    )
    return triton_call(
        kernel,
        grid=(pl.cdiv(count, block),),
        out_shape=jax.ShapeDtypeStruct((len(pairs), count), dtype),
        num_warps=num_warps,
        interpret=interpret,
        name=f"coded_product_{bits}",
    )(*operands)
