"""Products with matrices of weights in 8 or 4 bits, which are read as they are stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.coded_matrix import CodedMatrix
from pallas_kernels.formats.prepared import Prepared
from pallas_kernels.layer.coded_product import pallas_triton, reference

__all__ = ["CODED_PRODUCT", "coded_product"]

CODED_PRODUCT = Operation(
    "coded_product",
    {
        "pallas_triton": Implementation(pallas_triton.coded_product, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.coded_product),
    },
)


def coded_product(
    x: jax.Array | Prepared,
    matrix: CodedMatrix,
    *,
    gated: bool = False,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Multiply vectors with a matrix in 8 or 4 bits. Sums are in float32.

    Differentiable: through ``xla``, with respect to ``x``.

    Args:
        x: [..., K], floating point; with ``gated`` [..., 2, K]. A kernel that multiplies integers reads the prepared ones.
        matrix: a matrix [N, K], where N may be several axes.
        gated: multiply silu(x[..., 0, :]) * x[..., 1, :], the input of the second projection of a gated MLP.
        dtype: dtype of the result; None takes the dtype of ``x``.
        implementation: "pallas_triton" (GPU; 1 to 16 vectors in bfloat16), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        [..., N] in ``dtype``.

    Raises:
        ValueError: the widths disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    prepared, x = (x, x.x) if isinstance(x, Prepared) else (Prepared(x=x), x)
    axes = (2, matrix.width) if gated else (matrix.width,)
    if x.shape[-len(axes) :] != axes or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"coded_product: got x {x.dtype} {x.shape} and a matrix {(*matrix.lead, matrix.width)}, expected floats "
            f"[..., {', '.join(map(str, axes))}]"
        )
    kind = jnp.dtype(x.dtype if dtype is None else dtype)
    integers = None if gated else prepared.integers(matrix.bits)
    return CODED_PRODUCT.run(
        x, matrix, integers=integers, gated=gated, dtype=kind, implementation=implementation, platform=platform
    )
