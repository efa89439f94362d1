"""Exact dense attention: of a cache with holes (``dense_attention``, ``column_mass``), of a prompt's chunks over a cache
without any (``prefix_attention``), and of whole sequences (``causal_attention``).

Dense attention is what every method is compared with, so it is exact, bounded in memory, and takes the same
cache: slots in any order, some empty, each with its own position.
"""

from __future__ import annotations

import jax

from pallas_kernels.dense_attention import blocked, mass_triton
from pallas_kernels.dense_attention.causal import CAUSAL_ATTENTION, causal_attention
from pallas_kernels.dense_attention.prefix import PREFIX_ATTENTION, prefix_attention
from pallas_kernels.dispatch import Implementation, Operation

__all__ = [
    "CAUSAL_ATTENTION",
    "COLUMN_MASS",
    "DENSE_ATTENTION",
    "PREFIX_ATTENTION",
    "causal_attention",
    "column_mass",
    "dense_attention",
    "prefix_attention",
]

DENSE_ATTENTION = Operation("dense_attention", {"xla": Implementation(blocked.attention)})
COLUMN_MASS = Operation(
    "column_mass",
    {
        "pallas_triton": Implementation(mass_triton.column_mass, ("gpu",), mass_triton.check),
        "xla": Implementation(blocked.column_mass),
    },
)


def dense_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    query_position: jax.Array,
    key_position: jax.Array,
    scale: float,
    limit: jax.Array | int | None = None,
    block: int = 1024,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of T queries over a cache: a query sees the held slots whose position is not after its own.

    Not differentiable (the loop over blocks has a traced bound); ``causal_attention`` is. Whatever the key
    and value of an empty slot hold, NaN included, changes nothing.

    Args:
        query: [B, H, G, T, D]; float32 or bfloat16.
        key: [B, H, S, D], same dtype.
        value: [B, H, S, D], same dtype.
        query_position: int32 [B, T], in tokens; -1 for a padding query, which sees nothing.
        key_position: int32 [B, H, S], in tokens; -1 where the slot is empty. Any order, may differ per head.
        scale: factor of the logits.
        limit: slots, int32 scalar, may be traced: slots >= limit are known to be empty or in the future of
            every query. None finds the last slot in sight by reading ``key_position`` once.
        block: slots per step of the loop; bounds the logits in memory at B * H * G * T * block * 4 bytes.
        implementation: "xla" or None.
        platform: see ``Operation.run``.

    Returns:
        out [B, H, G, T, D] in the dtype of the query, and lse float32 [B, H, G, T], the log of the softmax
        denominator; 0 and -inf for a query that sees nothing.

    Raises:
        ValueError: shapes or dtypes disagree, block is below 1, or the implementation is unknown.
    """
    _check("dense_attention", query, key, query_position, key_position, block)
    if (value.shape, value.dtype) != (key.shape, key.dtype):
        raise ValueError(
            f"dense_attention: got value {value.dtype} {value.shape}, expected as key {key.dtype} {key.shape}"
        )
    return DENSE_ATTENTION.run(
        query,
        key,
        value,
        query_position=query_position,
        key_position=key_position,
        scale=scale,
        limit=limit,
        block=min(block, key.shape[2]),
        implementation=implementation,
        platform=platform,
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
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Attention probability each slot receives, summed over the T queries and the G query heads.

    The score of H2O (arXiv 2306.14048). A second pass over the keys: the probabilities need the
    final ``lse`` of ``dense_attention``, called with the same arguments.

    Args:
        query: [B, H, G, T, D].
        key: [B, H, S, D], same dtype.
        lse: float32 [B, H, G, T] from ``dense_attention``.
        query_position: int32 [B, T].
        key_position: int32 [B, H, S].
        scale: factor of the logits.
        limit: as in ``dense_attention``.
        block: as in ``dense_attention``.
        implementation: "pallas_triton" (GPU; one query, D a power of two, one kernel, which needs neither ``limit`` nor
            ``block``), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        float32 [B, H, S]; 0 for empty slots. Sums over S to G times the number of queries that see anything.

    Raises:
        ValueError: shapes or dtypes disagree, block is below 1, or the implementation is unknown.
    """
    _check("column_mass", query, key, query_position, key_position, block)
    if lse.shape != query.shape[:4]:
        raise ValueError(f"column_mass: got lse {lse.shape}, expected [B, H, G, T] = {query.shape[:4]}")
    return COLUMN_MASS.run(
        query,
        key,
        lse,
        query_position=query_position,
        key_position=key_position,
        scale=scale,
        limit=limit,
        block=min(block, key.shape[2]),
        implementation=implementation,
        platform=platform,
    )


def _check(name, query, key, query_position, key_position, block):
    agree = (
        query.ndim == 5
        and key.ndim == 4
        and key.shape == (*query.shape[:2], key.shape[2], query.shape[4])
        and query_position.shape == (query.shape[0], query.shape[3])
        and key_position.shape == key.shape[:3]
    )
    if not agree:
        raise ValueError(
            f"{name}: got query {query.shape}, key {key.shape}, query_position {query_position.shape}, "
            f"key_position {key_position.shape}, expected [B, H, G, T, D], [B, H, S, D], [B, T], [B, H, S]"
        )
    if query.dtype != key.dtype:
        raise ValueError(f"{name}: got query {query.dtype} and key {key.dtype}, expected the same dtype")
    if block < 1:
        raise ValueError(f"{name}: got {block=}, expected at least 1 slot")
