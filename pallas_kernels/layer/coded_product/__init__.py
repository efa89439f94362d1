"""Products with matrices of weights in 8 or 4 bits, which are read as they are stored."""

from typing import Annotated

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Operation
from pallas_kernels.formats.coded_matrix import CodedMatrix
from pallas_kernels.layer.coded_product import jax_triton, pallas_triton, reference
from pallas_kernels.layer.coded_product.few_vectors import MOST_VECTORS
from pallas_kernels.signature import declared, forward

__all__ = ["CODED_PRODUCT", "MOST_VECTORS", "coded_product"]

# The check of "jax_triton", which is for comparison, is stricter than the first, so the first runs wherever it can.
CODED_PRODUCT = Operation.of("coded_product", pallas_triton, jax_triton, reference)


@declared(CODED_PRODUCT, derivative="through ``xla``, with respect to ``x``")
def coded_product(
    x: Annotated[Array, "floating ... K"],
    matrix: CodedMatrix,
    *,
    scale: Annotated[Array | None, "like x K"] = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Array | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Multiply vectors with a matrix in 8 or 4 bits. Sums are in float32.

    A norm of the vectors, gates, and a sum with the result can be computed in passing, without launches of their own.

    Args:
        matrix: [N, K], where N may be several axes.
        scale: ``x`` is normalised by its root mean square, times ``scale``. None: it is not.
        eps: added to the mean square.
        gated: the first of the axes N must be 2, and goes: the result is silu(first) * second.
        residual: of the result's shape and dtype, added to it.
        dtype: dtype of the result; None takes the dtype of ``x``.
        implementation: "pallas_triton" takes 1 to 16 vectors in bfloat16, 1 to 4 with a norm, gates or a residual.
            "jax_triton" is for comparison, through the package of that name: 1 to 16 vectors alone.

    Returns:
        [..., N] in ``dtype``.
    """
    shape = *matrix.lead, matrix.width
    if matrix.width != x.shape[-1]:
        raise ValueError(f"coded_product: got matrix {shape}, expected rows of {x.shape[-1]}, as x {x.shape} has")
    if gated and (len(shape) < 3 or shape[0] != 2):
        raise ValueError(f"coded_product: got gates and matrix {shape}, expected [2, N, K]")
    kind, expected = jnp.dtype(x.dtype if dtype is None else dtype), (*x.shape[:-1], *matrix.lead[gated:])
    if residual is not None and (residual.shape, residual.dtype) != (expected, kind):
        raise ValueError(f"coded_product: got residual {residual.dtype} {residual.shape}, expected {kind} {expected}")
    return forward(dtype=kind)
