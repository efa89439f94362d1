"""Products with matrices of weights in 8 or 4 bits, which are read as they are stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.coded_matrix import CodedMatrix
from pallas_kernels.layer.coded_product import jax_triton, pallas_triton, reference

__all__ = ["CODED_PRODUCT", "coded_product"]

CODED_PRODUCT = Operation(
    "coded_product",
    {
        "pallas_triton": Implementation(pallas_triton.coded_product, ("gpu",), pallas_triton.check),
        # For comparison. Its check is stricter than the first, so the first runs wherever it can.
        "jax_triton": Implementation(jax_triton.coded_product, ("gpu",), jax_triton.check),
        "xla": Implementation(reference.coded_product),
    },
)


def coded_product(
    x: jax.Array,
    matrix: CodedMatrix,
    *,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Multiply vectors with a matrix in 8 or 4 bits. Sums are in float32.

    Differentiable: through ``xla``, with respect to ``x``.

    Args:
        x: [..., K], floating point.
        matrix: a matrix [N, K], where N may be several axes.
        dtype: dtype of the result; None takes the dtype of ``x``.
        implementation: "pallas_triton" (GPU; 1 to 16 vectors in bfloat16), "jax_triton" (the same vectors, through the
            package of that name), "xla", or None for the first of "pallas_triton" and "xla" that runs.
        platform: see ``Operation.run``.

    Returns:
        [..., N] in ``dtype``.

    Raises:
        ValueError: the widths disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    if x.shape[-1:] != (matrix.width,) or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"coded_product: got x {x.dtype} {x.shape} and a matrix {(*matrix.lead, matrix.width)}, expected floats "
            f"[..., {matrix.width}]"
        )
    kind = jnp.dtype(x.dtype if dtype is None else dtype)
    return CODED_PRODUCT.run(x, matrix, dtype=kind, implementation=implementation, platform=platform)
