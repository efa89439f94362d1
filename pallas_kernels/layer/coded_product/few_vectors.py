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

MANY_ROWS = 16384  # of a matrix: they fill a GPU with larger programs
_THREADS = 32  # of a warp
_WORDS = {8: GROUP // 4, 4: CHUNK_WORDS}  # of a group in 8 bits, and of a chunk in 4 bits
# The codes of a word, as bytes: a mask and the type of a byte, for 8 bits and for the low and the high codes of 4 bits.
_BYTES = {8: ((-1, "s32"),), 4: ((0x0F0F0F0F, "u32"), (-0x0F0F0F10, "u32"))}
_HALF = "{{.reg .b16 x, y; mov.b32 {{x, y}}, $1; cvt.f32.f16 $0, {};}}"  # of a register with two float16
_WORD = "and.b32 c, ${word}, {mask}; dp2a.lo.s32.{kind} s, ${low}, c, s; dp2a.hi.s32.{kind} s, ${high}, c, s;"


@functools.cache
def _products_of_a_piece(mask: int, kind: str) -> str:
    # The sum is the first of four results, and the others are 0: assembly has as many results as operands.
    words = (_WORD.format(word=4 + k, low=8 + k, high=12 + k, mask=mask, kind=kind) for k in range(PIECE))
    rest = "mov.b32 $0, s; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
    return "{.reg .b32 c, s; mov.b32 s, 0; " + " ".join(words) + rest + "}"


def _products(words, pairs, mask, kind, interpret):
    # int32 [N, S / 4]: the sums of the products of each piece's bytes with two pairs of integers [S].
    if not interpret:
        args = [words, *(jnp.broadcast_to(x[None], words.shape) for x in pairs)]
        made = assembly(_products_of_a_piece(mask, kind), args, pack=PIECE)
    else:
        found = [(words & mask) >> (8 * place) & 255 for place in range(4)]
        codes = [(x ^ 128) - 128 if kind == "s32" else x for x in found]
        numbers = [(x << shift >> 16)[None] for x in pairs for shift in (16, 0)]
        made = sum(code * number for code, number in zip(codes, numbers, strict=True))
    return jnp.sum(pieces_of(made), axis=-1, dtype=jnp.int32)


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


def _kernel(pairs_ref, pieces_ref, codes_ref, scale_ref, *refs, bits, block, span, by_row, interpret):
    # pairs, pieces: see `Prepared`; codes int32 [N, W]; 8 bits: scale [N, G]; 4 bits: scale, minimum int32 [N, G / 2];
    # out [B, N].
    least_ref, out_ref = refs if bits == 4 else (None, *refs)
    row = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    safe, width = jnp.minimum(row, codes_ref.shape[0] - 1), codes_ref.shape[1]
    read = _read if width % span else lambda ref, at, end: ref[at]

    def added(i, totals):
        word = i * span + jnp.arange(span, dtype=jnp.int32)
        piece = i * (span // PIECE) + jnp.arange(span // PIECE, dtype=jnp.int32)
        words = read(codes_ref, (safe[:, None], word[None]), width)
        at, groups = (safe[:, None], (piece * PIECE // _WORDS[bits])[None]), width // _WORDS[bits]
        if bits == 4:
            both = [read(ref, at, groups) for ref in (scale_ref, least_ref)]
            scales, minima = ([_half(x, odd, interpret) for odd in (0, 1)] for x in both)
            scales[1] = scales[1] * (1 / 16)
        else:
            scales, minima = [] if by_row else [read(scale_ref, at, groups).astype(jnp.float32)], []
        made = []
        for vector, total in enumerate(totals):
            sums = []
            for place, (mask, kind) in enumerate(_BYTES[bits]):
                pairs = [read(pairs_ref, (vector, 2 * place + j, word), width) for j in (0, 1)]
                sums.append(_products(words, pairs, mask, kind, interpret).astype(jnp.float32))
            unit, *numbers = (
                read(pieces_ref, (vector, k, piece), width // PIECE)[None] for k in range(pieces_ref.shape[1])
            )
            scaled = sums[0] if by_row else sums[0] * scales[0]
            if bits == 4:
                scaled = fused(sums[1], scales[1], scaled, interpret)
            total = fused(scaled, unit, total, interpret)
            for number, least in zip(numbers, minima, strict=True):
                total = fused(number, least, total, interpret)
            made.append(total)
        return tuple(made)

    none = (jnp.zeros((block, span // PIECE), jnp.float32),) * pairs_ref.shape[0]
    totals = lax.fori_loop(0, pl.cdiv(width, span), added, none)
    for vector, total in enumerate(totals):
        made = jnp.sum(total, axis=-1)
        if by_row:
            made = made * scale_ref[safe, 0].astype(jnp.float32)
        plt.store(out_ref.at[vector, row], made.astype(out_ref.dtype), mask=row < codes_ref.shape[0])


def sizes(vectors: int, bits: int, rows: int) -> dict[str, int]:
    """Return the rows of a program and its warps that were fastest on an H200 (docs/notebook/weights.md)."""
    return {"block": 4, "num_warps": 1}


@functools.partial(jax.jit, static_argnames=("dtype", "block", "num_warps", "interpret"))
def coded_product(pairs, pieces, matrix, *, dtype, block: int, num_warps: int, interpret=False):
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
        _kernel, bits=bits, block=block, span=_THREADS * num_warps * PIECE, by_row=matrix.by_row, interpret=interpret
    )
    return triton_call(
        kernel,
        grid=(pl.cdiv(count, block),),
        out_shape=jax.ShapeDtypeStruct((len(pairs), count), dtype),
        num_warps=num_warps,
        interpret=interpret,
        name=f"coded_product_{bits}",
    )(*operands)
