"""Attention probability that every slot of a cache receives: its sum over queries (H2O), or the largest (KVzip)."""

from typing import Annotated, Literal

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.score.column_mass import pallas_triton, reference
from pallas_kernels.signature import LOOP, declared, forward

COLUMN_MASS = Operation.of("column_mass", pallas_triton, reference, logits=True)


@declared(COLUMN_MASS, derivative=LOOP)
def column_mass(
    query: Annotated[Array, "B H G T D"],
    key: Annotated[Array, "like query B H S D"],
    lse: Annotated[Array, "float32 B H G T"],
    *,
    query_position: Annotated[Array, "int32 B T"],
    key_position: Annotated[Array, "int32 B H S"],
    scale: float,
    limit: Annotated[Array | int | None, "int32 []"] = None,
    block: Annotated[int, ">=1"] = 1024,
    reduce: Literal["sum", "max"] = "sum",
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Sum the attention probabilities that each slot receives over T queries and G query heads, or take the largest.

    The sum is the score of H2O (arXiv 2306.14048), the largest is the score of KVzip (arXiv 2505.23416). It is a
    second pass over the keys: the probabilities need the final ``lse``, which ``dense_attention`` returns for the same
    arguments.

    Args:
        lse: the log of the softmax denominator, which may count keys that are not among the S.
        query_position: as in ``dense_attention``.
        key_position: as in ``dense_attention``.
        limit: as in ``dense_attention``.
        block: as in ``dense_attention``.
        reduce: over the queries that see a slot.
        implementation: "pallas_triton" is one kernel, which needs neither ``limit`` nor ``block``; D a power of two.

    Returns:
        float32 [B, H, S]; 0 for empty slots. Summed over S, "sum" gives G times the number of queries that see a token.
    """
    return forward(block=min(block, key.shape[2]))
