"""The queries of several tokens: their mean, which scores, and each rotated to attend (TokenSelect)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.query.chunk_query import pallas_triton, reference

__all__ = ["CHUNK_QUERY", "chunk_query"]

CHUNK_QUERY = Operation(
    "chunk_query",
    {
        "pallas_triton": Implementation(pallas_triton.chunk_query, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.chunk_query),
    },
)


def chunk_query(
    query: jax.Array,
    real: jax.Array,
    first: jax.Array,
    inv_freq: jax.Array,
    *,
    num_local: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Rotate the queries of several tokens to attend, and take the mean of their scoring queries.

    Differentiable: through ``xla``.

    Args:
        query: [B, H, G, T, D], not rotated.
        real: int32 [B], number of real tokens among the T; padding follows them.
        first: int32 [B], place of the first token. Query t attends from ``first + t`` and scores from ``num_local + t``.
        inv_freq: float32 [D/2], radians per place.
        num_local: see ``first``.
        implementation: "pallas_triton" (GPU; D a power of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        mean float32 [B, H, G, D] of the real scoring queries, each rotated in float32, and rotated [B, H, G, T, D] in the
        dtype of the query, the queries that attend.

    Raises:
        ValueError: the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    args = query, real, first, jnp.asarray(inv_freq)
    return CHUNK_QUERY.run(*args, num_local=num_local, implementation=implementation, platform=platform)
