"""Products with a matrix in 8 or 4 bits as one Pallas Triton kernel, which reads every code once.

One to four vectors go through integer dot products (`few_vectors`), five to sixteen through tensor cores (`many_vectors`).
"""

from __future__ import annotations

import math

import jax.numpy as jnp

from pallas_kernels._triton.offsets import check_bytes
from pallas_kernels.formats.coded_matrix import CHUNK, GROUP
from pallas_kernels.formats.prepared import MOST_VECTORS
from pallas_kernels.layer.coded_product import few_vectors, many_vectors
from pallas_kernels.layer.coded_product.integers import integers_of
from pallas_kernels.layer.coded_product.reference import gate


def coded_product(x, matrix, *, integers, gated, dtype, interpret=False):
    """Multiply up to 16 vectors x [..., K], or [..., 2, K] with ``gated``; ``integers``: pairs and pieces of x, or None."""
    flat, lead = matrix.flat, x.shape[: -2 if gated else -1]
    count, rows = flat.codes.shape[0], math.prod(lead)
    if rows <= MOST_VECTORS:
        sizes = few_vectors.sizes(rows, flat.bits, count, matrix.width)
        if integers is None:
            integers = integers_of(x.reshape(rows, -1), bits=flat.bits, gated=gated, interpret=interpret)
        made = few_vectors.coded_product(*integers, flat, dtype=dtype, interpret=interpret, **sizes)
    else:
        sizes = many_vectors.sizes(flat.bits, count)
        x = (gate(x) if gated else x).reshape(rows, -1)
        made = many_vectors.coded_product(x, flat, dtype=dtype, interpret=interpret, **sizes)
    return made.reshape(*lead, *matrix.lead)


def check(x, matrix, *, integers, gated, dtype):
    """Raise ``NotImplementedError`` for vectors and matrices that the kernel does not take."""
    rows, width = math.prod(x.shape[: -2 if gated else -1]), matrix.width
    if not 1 <= rows <= many_vectors.MOST_VECTORS:
        raise NotImplementedError(f"got {rows} vectors, expected 1 to {many_vectors.MOST_VECTORS}")
    if x.dtype != jnp.bfloat16:
        raise NotImplementedError(f"got vectors of {x.dtype}, expected bfloat16")
    scales = matrix.scales
    by_group = scales.shape[-1] * GROUP == width
    if matrix.bits == 4:
        fits = by_group and scales.dtype == jnp.float16
    else:
        fits = matrix.minima is None and (by_group or matrix.by_row)
    if not fits or width % CHUNK:
        raise NotImplementedError(
            f"got {matrix.bits} bits with {scales.shape[-1]} scales in {scales.dtype} for rows of {width}, expected rows of "
            f"a multiple of {CHUNK} and a scale for {GROUP} numbers, in 4 bits of float16, or in 8 bits a scale a row"
        )
    check_bytes(matrix.codes)
