"""Products of up to 16 vectors with a matrix in 8 or 4 bits on tensor cores, as one Pallas Triton kernel.

A program computes some rows of the matrix for all vectors. Codes are read as 16 bits at a time and become bfloat16 in the
registers of a tensor core; each place of a code within 16 bits is a product of its own, with the even or the odd numbers of
the vectors, which are put in that order before. A code of 8 bits becomes its number over a power of two
(`pallas_kernels._triton.code_products`). A code of 4 bits is put behind the exponent of 128: the bfloat16 is 128 + code,
exactly. The product of a group is multiplied by the group's scale; what 128 and the minimum add is the sum of the vector's
numbers in the group times (minimum - 128 * scale).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.assembly import assembly
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.code_products import UNIT, pairs, values
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.formats.coded_matrix import CHUNK
from pallas_kernels.layer.coded_product.few_vectors import MANY_ROWS

MOST_VECTORS = 16  # which a tensor core multiplies at a time
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

    total = lax.fori_loop(0, codes_ref.shape[1] // span, body, jnp.zeros((MOST_VECTORS, block), jnp.float32))
    scale = scale_ref[safe, 0].astype(jnp.float32) * (1 / UNIT["int8"])
    plt.store(
        out_ref.at[rows[:, None], row[None, :]], (total * scale[None, :]).astype(out_ref.dtype), mask=x_mask & inside[None]
    )


def _grouped_bytes_kernel(x_ref, codes_ref, scale_ref, out_ref, *, block, chunks, interpret):
    # x [B, K]; codes int16 [N, K / 2]; scale [N, G]; out [B, N].
    rows, row, inside, safe, vector, x_mask = _places(x_ref, codes_ref, block)
    none = jnp.zeros((MOST_VECTORS, block), jnp.float32)

    def body(i, total):
        for step in range(2 * chunks):
            group = 2 * i * chunks + step
            word = jnp.arange(_WORDS, dtype=jnp.int32)
            words = codes_ref[safe[:, None], (group * _WORDS + word)[None, :]]
            made = none
            for odd, part in enumerate(values(words, "int8", interpret)):
                first = (i * chunks + step // 2) * CHUNK + _PAIRS * odd + step % 2 * _WORDS
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
    none = jnp.zeros((MOST_VECTORS, block), jnp.float32)

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
    rows = jnp.arange(MOST_VECTORS, dtype=jnp.int32)
    row = pl.program_id(0) * block + jnp.arange(block, dtype=jnp.int32)
    inside, safe = row < codes_ref.shape[0], jnp.minimum(row, codes_ref.shape[0] - 1)
    return rows, row, inside, safe, jnp.minimum(rows, x_ref.shape[0] - 1), (rows < x_ref.shape[0])[:, None]


def sizes(bits: int, rows: int) -> dict[str, int]:
    """Return the rows of a program and the words of a step that were fastest on an H100 and an H200."""
    return {"block": 64 if bits == 4 and rows >= MANY_ROWS else 32, "span": 128 if bits == 8 else 64}


@functools.partial(jax.jit, static_argnames=("dtype", "block", "span", "num_warps", "num_stages", "interpret"))
def coded_product(x, matrix, *, dtype, block: int, span: int, num_warps: int = 4, num_stages: int = 4, interpret=False):
    """Multiply x [B, K] with a matrix of one axis N, ``block`` rows per program, ``span`` words of 16 bits at a time."""
    count = matrix.codes.shape[0]
    even_then_odd = x.reshape(len(x), -1, _PAIRS, 2).swapaxes(-1, -2).reshape(x.shape)
    codes = pairs(lax.bitcast_convert_type(matrix.codes, jnp.int8))
    operands = even_then_odd, codes, matrix.scales
    if matrix.bits == 8 and matrix.by_row:
        kernel = functools.partial(_bytes_kernel, span=math.gcd(span, codes.shape[1]))
    else:
        words, kernel = (_PAIRS, _grouped_bytes_kernel) if matrix.bits == 8 else (_WORDS, _nibbles_kernel)
        kernel = functools.partial(kernel, chunks=math.gcd(max(1, span // words), codes.shape[1] // words))
    if matrix.bits == 4:
        operands = *operands, jnp.zeros_like(matrix.scales) if matrix.minima is None else matrix.minima
    return triton_call(
        functools.partial(kernel, block=block, interpret=interpret),
        grid=(pl.cdiv(count, block),),
        out_shape=jax.ShapeDtypeStruct((len(x), count), dtype),
        num_warps=num_warps,
        num_stages=num_stages,
        interpret=interpret,
        name=f"coded_product_{matrix.bits}",
    )(*operands)
