"""Sum, norm and integers of the norm as one Pallas Triton kernel, a program per row."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.formats.coded_matrix import CHUNK
from pallas_kernels.formats.prepared import MOST_VECTORS, Prepared, integer_shapes
from pallas_kernels.layer.add_norm.pallas_triton import MOST_WIDTH
from pallas_kernels.layer.coded_product.integers import numbers_of, pair_of, places, rounded, write


def _kernel(x_ref, update_ref, scale_ref, sum_ref, normed_ref, pairs_ref, pieces_ref, *, bits, size, eps, interpret):
    # x, update, sum, normed int32 [B, D / 2], scale int32 [D / 2]: two bfloat16 each.
    vector, word = pl.program_id(0), jnp.arange(size, dtype=jnp.int32)
    inside, where = word < pairs_ref.shape[2], places(word, bits)
    sums = []
    for at in where:
        x, update = (numbers_of(plt.load(ref.at[vector, at], mask=inside, other=0)) for ref in (x_ref, update_ref))
        sums.append(rounded([a + b for a, b in zip(x, update, strict=True)]))
        plt.store(sum_ref.at[vector, at], pair_of(*sums[-1]), mask=inside)
    square = functools.reduce(jnp.add, [x * x for two in sums for x in two])
    factor = lax.rsqrt(jnp.sum(square) / (2 * x_ref.shape[1]) + eps)
    numbers = []
    for at, two in zip(where, sums, strict=True):
        scale = numbers_of(plt.load(scale_ref.at[at], mask=inside, other=0))
        two = rounded([x * factor * y for x, y in zip(two, scale, strict=True)])
        plt.store(normed_ref.at[vector, at], pair_of(*two), mask=inside)
        numbers += two
    write(numbers, pairs_ref, pieces_ref, vector, word, interpret)


def norm_prepared(x, update, scale, *, eps, bits, num_warps: int = 16, interpret=False):
    """Add an update, normalise the sum, and prepare the norm; ``interpret=True`` runs anywhere, slowly."""
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    pairs, pieces = integer_shapes(rows, width, bits)
    size = pl.next_power_of_2(pairs.shape[2])
    row = jax.ShapeDtypeStruct((rows, width // 2), jnp.int32)
    two = (lax.bitcast_convert_type(a.reshape(-1, width // 2, 2), jnp.int32) for a in (x, update))
    total, normed, pairs, pieces = triton_call(
        functools.partial(_kernel, bits=bits, size=size, eps=eps, interpret=interpret),
        grid=(rows,),
        out_shape=(row, row, pairs, pieces),
        num_warps=min(num_warps, max(size // 32, 1)),
        interpret=interpret,
        name="norm_prepared",
    )(*two, lax.bitcast_convert_type(scale.reshape(-1, 2), jnp.int32))
    total, normed = (lax.bitcast_convert_type(a, x.dtype).reshape(x.shape) for a in (total, normed))
    return total, Prepared(x=normed, pairs=pairs, pieces=pieces)


def check(x, update, scale, *, eps, bits):
    """Raise ``NotImplementedError`` for rows that the kernel is not made for."""
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    if not 1 <= rows <= MOST_VECTORS or not 1 <= width <= MOST_WIDTH or width % CHUNK:
        raise NotImplementedError(
            f"got {rows} rows of {width}, expected 1 to {MOST_VECTORS} rows of a multiple of {CHUNK}, {MOST_WIDTH} at most"
        )
    if x.dtype != jnp.bfloat16 or scale.dtype != jnp.bfloat16:
        raise NotImplementedError(f"got rows of {x.dtype} and a scale of {scale.dtype}, expected bfloat16")
