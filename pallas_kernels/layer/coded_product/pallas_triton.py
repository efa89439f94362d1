"""The product of a few vectors with a matrix in 8 or 4 bits as one Pallas Triton kernel, which reads every code once.

A program computes some rows of the matrix for all vectors. Codes are read as 16 bits at a time and become bfloat16 in the
registers of a tensor core; each place of a code within 16 bits is a product of its own, with every second or fourth number of
the vectors. A code of 8 bits becomes its number over a power of two (`pallas_kernels._triton.code_products`). A code of 4
bits is put behind the exponent of 128: the bfloat16 is 128 + code, exactly. The product of a group is multiplied by the
group's scale; what 128 and the minimum add is the sum of the vector's numbers in the group times (minimum - 128 * scale).
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.assembly import assembly
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.code_products import UNIT, pairs, values
from pallas_kernels._triton.offsets import check_bytes
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.formats.coded_matrix import CHUNK, GROUP
from pallas_kernels.layer.coded_product import one_vector

MOST_ROWS = 16  # vectors that a tensor core multiplies at a time
_WORDS = 16  # of 16 bits: the codes of a chunk in 4 bits
_PAIRS = 32  # the same in 8 bits
_OFFSET = 128.0
_PLANE = "{{.reg .b32 x; shr.u32 x, $1, {}; lop3.b32 $0, x, 0x000F000F, 0x43004300, 0xEA;}}"  # (x & mask) | exponent


def _plane(words, place, interpret):
    # The codes at bits 4 * place of int16 words, as bfloat16 numbers 128 + code.
    if interpret:
        return (((words.astype(jnp.int32) >> (4 * place)) & 15) + int(_OFFSET)).astype(jnp.bfloat16)
    return assembly(_PLANE.format(4 * place), [words], pack=2, result=jnp.bfloat16)


def _bytes_kernel(x_ref, codes_ref, scale_ref, out_ref, *, block, span, interpret):
    # x [B, K]; codes int16 [N, K / 2]; scale [N, 1]; out [B, N].
    rows, row, inside, safe, vector, x_mask = _places(x_ref, codes_ref, block)

    def body(i, total):
        word = i * span + jnp.arange(span, dtype=jnp.int32)
        words = codes_ref[safe[:, None], word[None, :]]
        first = word // _PAIRS * CHUNK + word % _PAIRS
        for odd, part in enumerate(values(words, "int8", interpret)):
            at = x_ref.at[vector[:, None], (first + _PAIRS * odd)[None, :]]
            total = total + plt.dot(plt.load(at, mask=x_mask, other=0), part, trans_b=True)
        return total

    total = lax.fori_loop(0, codes_ref.shape[1] // span, body, jnp.zeros((MOST_ROWS, block), jnp.float32))
    scale = scale_ref[safe, 0].astype(jnp.float32) * (1 / UNIT["int8"])
    plt.store(
        out_ref.at[rows[:, None], row[None, :]],
        (total * scale[None, :]).astype(out_ref.dtype),
        mask=x_mask & inside[None],
    )


def _grouped_bytes_kernel(x_ref, codes_ref, scale_ref, out_ref, *, block, chunks, interpret):
    # x [B, K]; codes int16 [N, K / 2]; scale [N, G]; out [B, N].
    rows, row, inside, safe, vector, x_mask = _places(x_ref, codes_ref, block)
    none = jnp.zeros((MOST_ROWS, block), jnp.float32)

    def body(i, total):
        for step in range(2 * chunks):
            group = 2 * i * chunks + step
            word = jnp.arange(_WORDS, dtype=jnp.int32)
            words = codes_ref[safe[:, None], (group * _WORDS + word)[None, :]]
            made = none
            for odd, part in enumerate(values(words, "int8", interpret)):
                first = group // 2 * CHUNK + _PAIRS * odd + group % 2 * _WORDS
                at = x_ref.at[vector[:, None], (first + word)[None, :]]
                made = made + plt.dot(plt.load(at, mask=x_mask, other=0), part, trans_b=True)
            total = total + made * scale_ref[safe, group].astype(jnp.float32)[None, :]
        return total

    total = lax.fori_loop(0, codes_ref.shape[1] // (_PAIRS * chunks), body, none) * (1 / UNIT["int8"])
    plt.store(out_ref.at[rows[:, None], row[None, :]], total.astype(out_ref.dtype), mask=x_mask & inside[None])


def _nibbles_kernel(x_ref, codes_ref, scale_ref, least_ref, out_ref, *, block, chunks, interpret):
    # x [B, K]; codes int16 [N, K / 4]; scale, least [N, G]; out [B, N].
    rows, row, inside, safe, vector, x_mask = _places(x_ref, codes_ref, block)
    ones = jnp.ones((block, _WORDS), jnp.bfloat16)
    none = jnp.zeros((MOST_ROWS, block), jnp.float32)

    def body(i, total):
        for step in range(chunks):
            chunk = i * chunks + step
            word = jnp.arange(_WORDS, dtype=jnp.int32)
            words = codes_ref[safe[:, None], (chunk * _WORDS + word)[None, :]]
            for half in (0, 1):  # a group of 32 numbers
                made, added = none, none
                for place in (half, 2 + half):
                    at = x_ref.at[vector[:, None], (chunk * CHUNK + place * _WORDS + word)[None, :]]
                    x = plt.load(at, mask=x_mask, other=0)
                    made = made + plt.dot(x, _plane(words, place, interpret), trans_b=True)
                    added = added + plt.dot(x, ones, trans_b=True)  # the sum of the vector's numbers, in every column
                scale = scale_ref[safe, 2 * chunk + half].astype(jnp.float32)
                rest = least_ref[safe, 2 * chunk + half].astype(jnp.float32) - _OFFSET * scale
                total = total + made * scale[None, :] + added * rest[None, :]
        return total

    total = lax.fori_loop(0, codes_ref.shape[1] // (_WORDS * chunks), body, none)
    plt.store(out_ref.at[rows[:, None], row[None, :]], total.astype(out_ref.dtype), mask=x_mask & inside[None])


def _places(x_ref, codes_ref, block):
    # The vectors and the rows of the matrix of a program: where they are stored, which there are, and where to read.
    rows = jnp.arange(MOST_ROWS, dtype=jnp.int32)
    row = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    inside, safe = row < codes_ref.shape[0], jnp.minimum(row, codes_ref.shape[0] - 1)
    return rows, row, inside, safe, jnp.minimum(rows, x_ref.shape[0] - 1), (rows < x_ref.shape[0])[:, None]


@functools.partial(jax.jit, static_argnames=("dtype", "block", "span", "num_warps", "num_stages", "interpret"))
def coded_product(
    x,
    matrix,
    *,
    dtype,
    block: int = 32,
    span: int | None = None,
    num_warps: int = 4,
    num_stages: int = 4,
    interpret=False,
):
    """Multiply up to 16 vectors; ``block`` rows of the matrix per program, ``span`` words of 16 bits of each at a time."""
    flat, rows = matrix.flat, x.reshape(-1, matrix.width)
    if len(rows) <= one_vector.MOST_VECTORS:
        made = one_vector.coded_product(rows, flat, dtype=dtype, interpret=interpret)
        return made.reshape(*x.shape[:-1], *matrix.lead)
    rows = rows.reshape(len(rows), -1, _PAIRS, 2).swapaxes(-1, -2).reshape(rows.shape)  # even numbers of a chunk, then odd ones
    count = flat.codes.shape[0]
    codes = pairs(lax.bitcast_convert_type(flat.codes, jnp.int8))
    if matrix.bits == 8 and not matrix.by_row:
        chunks = math.gcd(max(1, (span or 64) // _PAIRS), codes.shape[1] // _PAIRS)
        kernel = functools.partial(_grouped_bytes_kernel, block=block, chunks=chunks, interpret=interpret)
        operands = rows, codes, flat.scales
    elif matrix.bits == 8:
        span = math.gcd(span or 128, codes.shape[1])
        kernel = functools.partial(_bytes_kernel, block=block, span=span, interpret=interpret)
        operands = rows, codes, flat.scales
    else:
        chunks = math.gcd(max(1, (span or 64) // _WORDS), codes.shape[1] // _WORDS)
        kernel = functools.partial(_nibbles_kernel, block=block, chunks=chunks, interpret=interpret)
        operands = rows, codes, flat.scales, jnp.zeros_like(flat.scales) if flat.minima is None else flat.minima
    made = triton_call(
        kernel,
        grid=(pl.cdiv(count, block),),
        out_shape=jax.ShapeDtypeStruct((len(rows), count), dtype),
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpret,
        name=f"coded_product_{matrix.bits}",
    )(*operands)
    return made.reshape(*x.shape[:-1], *matrix.lead)


def check(x, matrix, *, dtype):
    """Raise ``NotImplementedError`` for vectors and matrices that the kernel does not take."""
    rows, width = math.prod(x.shape[:-1]), matrix.width
    if not 1 <= rows <= MOST_ROWS:
        raise NotImplementedError(f"got {rows} vectors, expected 1 to {MOST_ROWS}")
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"got vectors of {x.dtype}, expected bfloat16")
    by_group = matrix.scales.shape[-1] * GROUP == width and (matrix.bits == 4 or matrix.minima is None)
    if not (matrix.by_row or by_group) or width % CHUNK:
        raise NotImplementedError(
            f"got {matrix.bits} bits with {matrix.scales.shape[-1]} scales for rows of {width}, expected 8 bits with a scale "
            f"a row, or a scale for {GROUP} numbers, and rows of a multiple of {CHUNK}"
        )
    check_bytes(matrix.codes)
