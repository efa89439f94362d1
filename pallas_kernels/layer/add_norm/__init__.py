"""Adds an update to the residual stream and normalises the sum, in one launch."""

import functools
from typing import Annotated

import jax
from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.layer.add_norm import pallas_mosaic_gpu, pallas_triton, reference
from pallas_kernels.layer.add_norm.reference import rms_norm
from pallas_kernels.signature import declared, forward

__all__ = ["ADD_NORM", "add_norm", "rms_norm"]

ADD_NORM = Operation.of("add_norm", pallas_triton, pallas_mosaic_gpu, reference)


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4, 5))
@declared(ADD_NORM, derivative="through ``pallas_triton`` and ``xla``, with the derivative of the reference")
def add_norm(
    x: Annotated[Array, "floating ... D"],
    update: Annotated[Array, "like x"],
    scale: Annotated[Array, "floating D"],
    eps: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Add ``update`` to ``x`` and normalise the sum by its root mean square.

    Args:
        eps: added to the mean square.
        implementation: "pallas_triton" takes up to 1024 rows of at most 16384.

    Returns:
        The sum, and the norm of the rounded sum times ``scale``, computed in float32; both [..., D] in the dtype of ``x``.
    """
    return forward()


@add_norm.defjvp
def _jvp(eps, implementation, platform, primals, tangents):
    out = add_norm(*primals, eps, implementation, platform)
    _, moved = jax.jvp(functools.partial(reference.add_norm, eps=eps), primals, tangents)
    return out, moved
