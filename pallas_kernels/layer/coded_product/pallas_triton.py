"""Products with a matrix in 8 or 4 bits as one Pallas Triton kernel, which reads every code once.

One to four vectors go through integer dot products (`few_vectors`), five to sixteen through tensor cores (`many_vectors`).
"""

import math

import jax.numpy as jnp

from pallas_kernels._triton.checks import check_bytes
from pallas_kernels.formats.coded_matrix import CHUNK, GROUP
from pallas_kernels.layer.coded_product import few_vectors, many_vectors


def coded_product(x, matrix, *, dtype, scale=None, eps=0.0, gated=False, residual=None, interpret=False):
    """Multiply up to 16 vectors x [..., K]; up to 4 with a norm, gates or a residual."""
    flat, rows = matrix.flat, x.reshape(-1, matrix.width)
    count = flat.codes.shape[0]
    if len(rows) <= few_vectors.MOST_VECTORS:
        sizes = few_vectors.sizes(len(rows), flat.bits, count, matrix.width)
        residual = None if residual is None else residual.reshape(len(rows), -1)
        passing = {"eps": eps, "gated": gated, "interpret": interpret}
        made = few_vectors.coded_product(rows, flat, scale, residual, dtype=dtype, **passing, **sizes)
    else:
        sizes = many_vectors.sizes(flat.bits, count)
        made = many_vectors.coded_product(rows, flat, dtype=dtype, interpret=interpret, **sizes)
    return made.reshape(*x.shape[:-1], *matrix.lead[gated:])


def check(x, matrix, *, dtype, scale=None, eps=0.0, gated=False, residual=None):
    """Raise ``NotImplementedError`` for vectors and matrices that the kernel does not take."""
    rows, width = math.prod(x.shape[:-1]), matrix.width
    if not 1 <= rows <= many_vectors.MOST_VECTORS:
        raise NotImplementedError(f"got {rows} vectors, expected 1 to {many_vectors.MOST_VECTORS}")
    if (gated or scale is not None or residual is not None) and rows > few_vectors.MOST_VECTORS:
        raise NotImplementedError(
            f"got {rows} vectors with a norm, gates or a residual, expected {few_vectors.MOST_VECTORS} at most"
        )
    if scale is not None and scale.dtype != jnp.bfloat16:
        raise NotImplementedError(f"got a norm's scale of {scale.dtype}, expected bfloat16")
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
