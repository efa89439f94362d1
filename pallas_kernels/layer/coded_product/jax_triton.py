"""The product of up to 16 vectors through jax-triton: one kernel on tensor cores, which reads every code once."""

import math

import jax

from pallas_kernels._triton.jax_triton_call import launch, package
from pallas_kernels._triton.pallas import pl
from pallas_kernels.formats.coded_matrix import GROUP
from pallas_kernels.layer.coded_product import pallas_triton

_VECTORS = 16  # which a tensor core multiplies at a time
_BLOCK = 32  # rows of the matrix of a program
_SPAN = 128  # bytes of a row that are loaded at once, if the row has one scale
_SPANS = 4  # groups or chunks of a step, if it has several


def coded_product(x, matrix, *, dtype, **_):
    """Multiply up to 16 vectors x [..., K]: codes become bfloat16, products and what scales them are float32."""
    from pallas_kernels.layer.coded_product import jax_triton_body

    flat, rows = matrix.flat, x.reshape(-1, matrix.width)
    count, width = flat.codes.shape  # width in bytes
    span, spans = (math.gcd(width, _SPAN), 1) if flat.by_row else (GROUP, math.gcd(width // GROUP, _SPANS))
    (made,) = launch(
        jax_triton_body.product,
        tuple(x[None] for x in (rows, flat.codes, flat.scales, flat.scales if flat.minima is None else flat.minima)),
        (jax.ShapeDtypeStruct((1, len(rows), count), dtype),), grid=(1, pl.cdiv(count, _BLOCK)), num_warps=4, num_stages=4,
        VECTORS=len(rows), FILLED=_VECTORS, WIDTH=matrix.width, COUNT=count, GROUPS=flat.scales.shape[1],
        HAS_MINIMA=flat.minima is not None, HALVES=8 // flat.bits, BLOCK=_BLOCK, SPAN=span, SPANS=spans,
    )  # fmt: skip
    return made.reshape(*x.shape[:-1], *matrix.lead)


def check(x, matrix, *, dtype, scale=None, eps=0.0, gated=False, residual=None):
    """Raise ``NotImplementedError`` where "pallas_triton" does, for more than a product, and without the package."""
    pallas_triton.check(x, matrix, dtype=dtype)
    if gated or scale is not None or residual is not None:
        raise NotImplementedError("got a norm, gates or a residual, expected a product alone")
    package()
