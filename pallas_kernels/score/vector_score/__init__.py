"""Scores of tokens or sentences that have one vector each, for the query of a decode step."""

from typing import Annotated, Literal

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.score.vector_score import pallas_mosaic_gpu, pallas_tpu, pallas_triton, reference
from pallas_kernels.signature import declared, forward

VECTOR_SCORE = Operation.of("vector_score", pallas_triton, pallas_mosaic_gpu, pallas_tpu, reference)


@declared(VECTOR_SCORE)
def vector_score(
    query: Annotated[Array, "floating B H G D"],
    vector: Annotated[Array, "floating B H P D"],
    limit: Annotated[Array, "int32 B or B H"],
    *,
    added: Annotated[Array | None, "float32 B H G D"] = None,
    reduce: Literal["sum", "each"] = "sum",
    position: Annotated[Array | None, "int32 B H P"] = None,
    first: int = 0,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Multiply the queries with every vector in use, products and sums in float32.

    The vectors are the mean keys of sentences (SentenceKV), or the keys of tokens: with ``position`` and ``first`` only the
    tokens between two slots are scored (RetrievalAttention, arXiv:2409.10516).

    Args:
        vector: may differ from the query in dtype; vectors that are not in use may hold anything.
        limit: the vectors in use are those before.
        added: added to the query in float32 before the products; or None.
        reduce: how the query heads of a group are joined; "each" keeps them apart.
        position: below 0 for a vector that does not take part; only for "each". Or None.
        first: the vectors before it do not take part; only for "each".
        implementation: "pallas_triton" takes D a power of two; "pallas_tpu" D a multiple of 128, P of 8, not "each".

    Returns:
        float32 [B, H, P], or [B, H, G, P] of each query head; -inf for vectors that are not in use or do not take part, and
        for a product of NaN.
    """
    if reduce != "each" and (position is not None or first):
        raise ValueError(f"vector_score: got position or first with {reduce=}, expected reduce='each'")
    return forward()
