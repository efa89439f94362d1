"""How far the direction of each stored key is from the mean direction of its head: the score of KeyDiff."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.score.dissimilarity import pallas_triton, reference

__all__ = ["DISSIMILARITY", "dissimilarity"]

DISSIMILARITY = Operation(
    "dissimilarity",
    {
        "pallas_triton": Implementation(pallas_triton.dissimilarity, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.dissimilarity),
    },
)


def dissimilarity(
    key: jax.Array, position: jax.Array, *, implementation: str | None = None, platform: str | None = None
) -> jax.Array:
    """Compute minus the cosine of every stored key and the mean direction of the stored keys, in float32.

    Differentiable: through ``xla``.

    Args:
        key: [B, H, S, D], floating point; empty slots may hold anything, NaN included.
        position: int32 [B, H, S], negative for an empty slot.
        implementation: "pallas_triton" (GPU; D a power of two: two kernels), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        float32 [B, H, S]; 0 for empty slots.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    if key.ndim != 4 or position.shape != key.shape[:3] or position.dtype != jnp.int32:
        raise ValueError(
            f"dissimilarity: got key {key.shape} and position {position.dtype} {position.shape}, expected [B, H, S, D] and "
            f"int32 [B, H, S]"
        )
    return DISSIMILARITY.run(key, position, implementation=implementation, platform=platform)
