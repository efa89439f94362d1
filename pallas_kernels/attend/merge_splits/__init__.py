"""Merges the partial results of split-K attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.attend.merge_splits import pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["MERGE_SPLITS", "merge_splits"]

MERGE_SPLITS = Operation(
    "merge_splits",
    {
        "pallas_triton": Implementation(pallas_triton.merge_splits, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.merge_splits),
    },
)


def merge_splits(
    out: jax.Array,
    lse: jax.Array,
    *,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Merge attention to N disjoint parts into attention to their union: `numerics.merge_partials` in one kernel.

    Differentiable: through ``xla``.

    Args:
        out: float32 [L, N, G, D], softmax over each part's own slots.
        lse: float32 [L, N, G], log of each part's softmax denominator. It is -inf for an empty part, whose ``out`` may hold
            anything.
        dtype: of the merged output.
        implementation: "pallas_triton" (GPU), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        out [L, G, D] in ``dtype`` and lse float32 [L, G]; 0 and -inf where every part is empty.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    if out.ndim != 4 or out.shape[:3] != lse.shape or not out.shape[1]:
        raise ValueError(
            f"merge_splits: got out {out.shape} and lse {lse.shape}, expected [L, N, G, D] and [L, N, G], N > 0"
        )
    if {str(out.dtype), str(lse.dtype)} != {"float32"}:
        raise ValueError(f"merge_splits: got out {out.dtype} and lse {lse.dtype}, expected float32")
    return MERGE_SPLITS.run(out, lse, dtype=dtype, implementation=implementation, platform=platform)
