"""Exact attention of several queries over a cache with holes: slots in any order, some empty, each with its own position.

Every method is compared with this operation, so it is exact, bounded in memory, and takes the same cache.
"""

from __future__ import annotations

import jax

from pallas_kernels.attend.dense_attention import cudnn, reference
from pallas_kernels.attend.dense_attention.checks import check_arrays
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["DENSE_ATTENTION", "dense_attention"]

DENSE_ATTENTION = Operation(
    "dense_attention",
    {
        "cudnn": Implementation(cudnn.dense_attention, ("gpu",), cudnn.check),
        "xla": Implementation(reference.dense_attention),
    },
    logits=True,
)


def dense_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    query_position: jax.Array,
    key_position: jax.Array,
    query_first: jax.Array | None = None,
    scale: float,
    limit: jax.Array | int | None = None,
    block: int = 1024,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with T queries to a cache: a query sees the tokens whose position is not after its own.

    The key and value of an empty slot may hold anything, NaN included. Training uses ``causal_attention``.

    Not differentiable: ``xla`` loops over blocks of keys up to a traced bound.

    Args:
        query: [B, H, G, T, D]; float32 or bfloat16.
        key: [B, H, S, D], same dtype.
        value: [B, H, S, E], same dtype; E need not be D.
        query_position: int32 [B, T], in tokens; -1 for a padding query, which sees nothing.
        key_position: int32 [B, H, S], in tokens; -1 where the slot is empty. Any order, may differ per head.
        query_first: int32 [B, T], the first position that each query sees, in tokens; None: all from 0 on.
        scale: factor of the logits.
        limit: int32 scalar, may be traced. The caller knows that slots from ``limit`` on are empty or in the future of
            every query. None reads ``key_position`` once to find the last slot that a query sees.
        block: slots per step of the loop; bounds the logits in memory at B * H * G * T * block * 4 bytes.
        implementation: "cudnn" (flash attention, which needs neither ``limit`` nor ``block``; GPU, bfloat16 or float16,
            several queries, E as D, B * H * S * max(T, 2 * D) at most 2^28), "xla" (blocks of keys), or None.
        platform: see ``Operation.run``.

    Returns:
        out [B, H, G, T, E] in the dtype of the query, and lse float32 [B, H, G, T], the log of the softmax
        denominator; 0 and -inf for a query that sees nothing.

    Raises:
        ValueError: shapes or dtypes disagree, block is below 1, or the implementation is unknown.
    """
    check_arrays("dense_attention", query, key, query_position, key_position, block)
    if (value.shape[:3], value.ndim, value.dtype) != (key.shape[:3], 4, key.dtype):
        raise ValueError(
            f"dense_attention: got value {value.dtype} {value.shape}, expected {key.dtype} {key.shape[:3]} and a width"
        )
    if query_first is not None and (query_first.shape, str(query_first.dtype)) != (query_position.shape, "int32"):
        raise ValueError(
            f"dense_attention: got query_first {query_first.dtype} {query_first.shape}, expected int32 {query_position.shape}"
        )
    return DENSE_ATTENTION.run(
        query,
        key,
        value,
        query_position=query_position,
        key_position=key_position,
        query_first=query_first,
        scale=scale,
        limit=limit,
        block=min(block, key.shape[2]),
        implementation=implementation,
        platform=platform,
    )
