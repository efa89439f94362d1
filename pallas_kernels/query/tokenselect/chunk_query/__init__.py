"""The queries of several tokens: their mean, which scores, and each rotated to attend (TokenSelect)."""

from typing import Annotated

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.query.tokenselect.chunk_query import pallas_triton, reference
from pallas_kernels.signature import declared, forward

CHUNK_QUERY = Operation.of("chunk_query", pallas_triton, reference)


@declared(CHUNK_QUERY)
def chunk_query(
    query: Annotated[Array, "B H G T D"],
    real: Annotated[Array, "int32 B"],
    first: Annotated[Array, "int32 B"],
    inv_freq: Annotated[Array, "float32 D/2"],
    *,
    num_local: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Rotate the queries of several tokens to attend, and take the mean of their scoring queries.

    Args:
        query: not rotated.
        real: number of real tokens among the T; padding follows them.
        first: place of the first token. Query t attends from ``first + t`` and scores from ``num_local + t``.
        inv_freq: radians per place.
        num_local: see ``first``.
        implementation: "pallas_triton" takes D a power of two.

    Returns:
        mean float32 [B, H, G, D] of the real scoring queries, each rotated in float32, and rotated [B, H, G, T, D] in the
        dtype of the query, the queries that attend.
    """
    return forward(inv_freq=jnp.asarray(inv_freq))
