"""Queries in the basis of every segment of packed vectors (MosaicKV)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.packed_vectors import TERMS
from pallas_kernels.query.project_query import pallas_triton, reference

__all__ = ["PROJECT_QUERY", "project_query"]

PROJECT_QUERY = Operation(
    "project_query",
    {
        "pallas_triton": Implementation(pallas_triton.project_query, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.project_query),
    },
)


def project_query(
    query: jax.Array,
    basis: jax.Array,
    *,
    dtype: DTypeLike,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Project queries onto the basis of every segment; the result is given as terms of ``dtype`` that add up to it.

    A product of a bfloat16 term and a bfloat16 value is exact in float32. So tensor cores compute scores that are as good as
    the scores of a float32 query.

    Differentiable: through ``xla``.

    Args:
        query: [B, H, G, D].
        basis: float32 [B, H, M, D, D]; the rows of each are unit vectors.
        dtype: bfloat16, float16 or float32.
        implementation: "pallas_triton" (GPU), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        [B, H, M, G, N, D] in ``dtype``, N terms each.

    Raises:
        ValueError: shapes disagree, ``dtype`` is none of these, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    agree = query.ndim == 4 and basis.ndim == 5
    if not agree or basis.shape != (*query.shape[:2], basis.shape[2], query.shape[3], query.shape[3]):
        raise ValueError(
            f"project_query: got query {query.shape}, basis {basis.shape}, expected [B, H, G, D], [B, H, M, D, D]"
        )
    if str(jnp.dtype(dtype)) not in TERMS:
        raise ValueError(f"project_query: got dtype {dtype}, expected one of {list(TERMS)}")
    return PROJECT_QUERY.run(query, basis, dtype=jnp.dtype(dtype), implementation=implementation, platform=platform)
