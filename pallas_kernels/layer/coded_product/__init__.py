"""Products with matrices of weights in 8 or 4 bits, which are read as they are stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.coded_matrix import CodedMatrix
from pallas_kernels.layer.coded_product import jax_triton, pallas_triton, reference
from pallas_kernels.layer.coded_product.few_vectors import MOST_VECTORS

__all__ = ["CODED_PRODUCT", "MOST_VECTORS", "coded_product"]

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
    scale: jax.Array | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: jax.Array | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Multiply vectors with a matrix in 8 or 4 bits. Sums are in float32.

    A norm of the vectors, gates, and a sum with the result can be computed in passing, without launches of their own.

    Differentiable: through ``xla``, with respect to ``x``.

    Args:
        x: [..., K], floating point.
        matrix: a matrix [N, K], where N may be several axes.
        scale: [K], in the dtype of ``x``: ``x`` is normalised by its root mean square, times ``scale``. None: it is not.
        eps: added to the mean square.
        gated: the first of the axes N must be 2, and goes: the result is silu(first) * second.
        residual: of the result's shape and dtype, added to it.
        dtype: dtype of the result; None takes the dtype of ``x``.
        implementation: "pallas_triton" (GPU; 1 to 16 vectors in bfloat16, 1 to 4 with a norm, gates or a residual),
            "jax_triton" (1 to 16 vectors alone, through the package of that name), "xla", or None for the first of
            "pallas_triton" and "xla" that runs.
        platform: see ``Operation.run``.

    Returns:
        [..., N] in ``dtype``.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    if x.shape[-1:] != (matrix.width,) or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"coded_product: got x {x.dtype} {x.shape} and a matrix {(*matrix.lead, matrix.width)}, expected floats "
            f"[..., {matrix.width}]"
        )
    kind = jnp.dtype(x.dtype if dtype is None else dtype)
    if gated and (len(matrix.lead) < 2 or matrix.lead[0] != 2):
        shape = *matrix.lead, matrix.width
        raise ValueError(f"coded_product: got gates and a matrix {shape}, expected [2, N, {matrix.width}]")
    expected = {"scale": ((matrix.width,), x.dtype), "residual": ((*x.shape[:-1], *matrix.lead[gated:]), kind)}
    for name, given in (("scale", scale), ("residual", residual)):
        if given is not None and (given.shape, given.dtype) != expected[name]:
            shape, of = expected[name]
            raise ValueError(f"coded_product: got a {name} {given.dtype} {given.shape}, expected {of} {shape}")
    return CODED_PRODUCT.run(
        x,
        matrix,
        scale=scale,
        eps=eps,
        gated=gated,
        residual=residual,
        dtype=kind,
        implementation=implementation,
        platform=platform,
    )
