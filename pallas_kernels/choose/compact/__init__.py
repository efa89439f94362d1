"""The true entries of masks as ascending lists."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.choose.compact import pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["COMPACT", "compact"]

COMPACT = Operation(
    "compact",
    {
        "pallas_triton": Implementation(pallas_triton.compact, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.compact),
    },
)


def compact(
    mask: jax.Array, capacity: int, *, implementation: str | None = None, platform: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """List the first ``capacity`` true entries of each row of a mask.

    Not differentiable: its results are integers and truth values.

    Args:
        mask: bool [..., S].
        capacity: static length K of the result.
        implementation: "pallas_triton" (GPU), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        slots int32 [..., K], the listed ones first and ascending, 0 behind them; keep bool [..., K], true where a slot is
        listed.

    Raises:
        ValueError: the mask is not bool, it has no axis, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    if mask.ndim < 1 or mask.dtype != jnp.bool_:
        raise ValueError(f"compact: got mask {mask.dtype} {mask.shape}, expected bool [..., S]")
    return COMPACT.run(mask, capacity, implementation=implementation, platform=platform)
