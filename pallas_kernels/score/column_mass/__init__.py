"""Attention probability that every slot of a cache receives: its sum over queries (H2O), or the largest (KVzip)."""

from __future__ import annotations

import jax

from pallas_kernels.attend.dense_attention.checks import check_arrays
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.score.column_mass import pallas_triton, reference

__all__ = ["COLUMN_MASS", "column_mass"]

COLUMN_MASS = Operation(
    "column_mass",
    {
        "pallas_triton": Implementation(pallas_triton.column_mass, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.column_mass),
    },
    logits=True,
)


def column_mass(
    query: jax.Array,
    key: jax.Array,
    lse: jax.Array,
    *,
    query_position: jax.Array,
    key_position: jax.Array,
    scale: float,
    limit: jax.Array | int | None = None,
    block: int = 1024,
    reduce: str = "sum",
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Sum the attention probabilities that each slot receives over T queries and G query heads, or take the largest.

    The sum is the score of H2O (arXiv 2306.14048), the largest is the score of KVzip (arXiv 2505.23416). It is a
    second pass over the keys: the probabilities need the final ``lse``, which ``dense_attention`` returns for the same
    arguments.

    Not differentiable: ``xla`` loops over blocks of keys up to a traced bound.

    Args:
        query: [B, H, G, T, D].
        key: [B, H, S, D], same dtype.
        lse: float32 [B, H, G, T], the log of the softmax denominator, which may count keys that are not among the S.
        query_position: int32 [B, T].
        key_position: int32 [B, H, S].
        scale: factor of the logits.
        limit: as in ``dense_attention``.
        block: as in ``dense_attention``.
        reduce: "sum" or "max", over the queries that see a slot.
        implementation: "pallas_triton" (GPU; D a power of two, one kernel, which needs neither ``limit`` nor ``block``),
            "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        float32 [B, H, S]; 0 for empty slots. Summed over S, "sum" gives G times the number of queries that see a token.

    Raises:
        ValueError: shapes or dtypes disagree, block is below 1, or ``reduce`` or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    check_arrays("column_mass", query, key, query_position, key_position, block)
    if lse.shape != query.shape[:4]:
        raise ValueError(f"column_mass: got lse {lse.shape}, expected [B, H, G, T] = {query.shape[:4]}")
    if reduce not in ("sum", "max"):
        raise ValueError(f"column_mass: got {reduce=}, expected 'sum' or 'max'")
    return COLUMN_MASS.run(
        query,
        key,
        lse,
        query_position=query_position,
        key_position=key_position,
        scale=scale,
        limit=limit,
        block=min(block, key.shape[2]),
        reduce=reduce,
        implementation=implementation,
        platform=platform,
    )
