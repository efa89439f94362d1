"""Keys and values of listed tokens side by side, the keys rotated (TokenSelect)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.query.rotated_rows import pallas_triton, reference

__all__ = ["ROTATED_ROWS", "rotated_rows"]

ROTATED_ROWS = Operation(
    "rotated_rows",
    {
        "pallas_triton": Implementation(pallas_triton.rotated_rows, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.rotated_rows),
    },
)


def rotated_rows(
    key: jax.Array | Quantised,
    value: jax.Array | Quantised,
    token: jax.Array,
    inv_freq: jax.Array,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Gather listed keys and values, and rotate the key of entry j at place j.

    Differentiable: through ``xla``.

    Args:
        key: [B, H, S, D], or codes.
        value: [B, H, S, D], same dtype, or codes; in device memory or in pinned host memory, scales in device memory.
        token: int32 [B, E], listed slots in [0, S), the same for all heads.
        inv_freq: float32 [D/2], radians per place.
        implementation: "pallas_triton" (GPU; D a power of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        key [B, H, E, D], rotated in float32 and rounded to its dtype, and value [B, H, E, D].

    Raises:
        ValueError: the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    args = key, value, token, jnp.asarray(inv_freq)
    return ROTATED_ROWS.run(*args, implementation=implementation, platform=platform)
