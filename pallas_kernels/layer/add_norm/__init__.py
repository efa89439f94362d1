"""Adds an update to the residual stream and normalises the sum, in one launch."""

from __future__ import annotations

import functools

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.layer.add_norm import pallas_triton, reference
from pallas_kernels.layer.add_norm.reference import rms_norm

__all__ = ["ADD_NORM", "add_norm", "rms_norm"]

ADD_NORM = Operation(
    "add_norm",
    {
        "pallas_triton": Implementation(pallas_triton.add_norm, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.add_norm),
    },
)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
def add_norm(
    x: jax.Array,
    update: jax.Array,
    scale: jax.Array,
    eps: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Add ``update`` to ``x`` and normalise the sum by its root mean square.

    Differentiable: through ``pallas_triton`` and ``xla``, with the derivative of the reference.

    Args:
        x: [..., D], floating point.
        update: [..., D], in the dtype of ``x``.
        scale: [D], any floating dtype.
        eps: added to the mean square.
        implementation: "pallas_triton" (GPU; up to 1024 rows of at most 16384), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        The sum, and the norm of the rounded sum times ``scale``, computed in float32; both [..., D] in the dtype of ``x``.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    if x.shape != update.shape or x.dtype != update.dtype or scale.shape != x.shape[-1:]:
        raise ValueError(
            f"add_norm: got x {x.dtype} {x.shape}, update {update.dtype} {update.shape}, scale {scale.shape}, "
            f"expected an update like x and a scale of {x.shape[-1:]}"
        )
    return ADD_NORM.run(x, update, scale, eps=eps, implementation=implementation, platform=platform)


@add_norm.defjvp
def _jvp(eps, implementation, platform, primals, tangents):
    out = add_norm(*primals, eps, implementation, platform)
    _, moved = jax.jvp(functools.partial(reference.add_norm, eps=eps), primals, tangents)
    return out, moved
