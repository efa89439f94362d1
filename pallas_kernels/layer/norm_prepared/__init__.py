"""Adds an update to the residual stream, normalises the sum, and prepares it for a product with codes, in one launch."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.prepared import Prepared
from pallas_kernels.layer.norm_prepared import pallas_triton, reference

__all__ = ["NORM_PREPARED", "norm_prepared"]

NORM_PREPARED = Operation(
    "norm_prepared",
    {
        "pallas_triton": Implementation(pallas_triton.norm_prepared, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.norm_prepared),
    },
)


def norm_prepared(
    x: jax.Array,
    update: jax.Array,
    scale: jax.Array,
    *,
    eps: float,
    bits: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, Prepared]:
    """Add ``update`` to ``x``, normalise the sum as ``add_norm`` does, and prepare the norm for a product with codes.

    Differentiable: through ``xla``.

    Args:
        x: [..., D], floating point.
        update: [..., D], in the dtype of ``x``.
        scale: [D], any floating dtype.
        eps: added to the mean square.
        bits: 8 or 4, of the codes that the norm is about to be multiplied with.
        implementation: "pallas_triton" (GPU; up to four rows in bfloat16), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        The sum [..., D], and the norm of the rounded sum times ``scale``. "xla" prepares no integers of it.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    if x.shape != update.shape or x.dtype != update.dtype or scale.shape != x.shape[-1:] or bits not in (4, 8):
        raise ValueError(
            f"norm_prepared: got x {x.dtype} {x.shape}, update {update.dtype} {update.shape}, scale {scale.shape}, {bits} "
            f"bits, expected an update like x, a scale of {x.shape[-1:]}, and 8 or 4 bits"
        )
    return NORM_PREPARED.run(x, update, scale, eps=eps, bits=bits, implementation=implementation, platform=platform)
