"""Exact attention of several queries over a cache with holes: slots in any order, some empty, each with its own position.

Every method is compared with this operation, so it is exact, bounded in memory, and takes the same cache.
"""

from typing import Annotated

from jax import Array

from pallas_kernels.attend.dense_attention import cudnn, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import LOOP, declared, forward

DENSE_ATTENTION = Operation.of("dense_attention", cudnn, reference, logits=True)


@declared(DENSE_ATTENTION, derivative=LOOP)
def dense_attention(
    query: Annotated[Array, "B H G T D"],
    key: Annotated[Array, "like query B H S D"],
    value: Annotated[Array, "like query B H S E"],
    *,
    query_position: Annotated[Array, "int32 B T"],
    key_position: Annotated[Array, "int32 B H S"],
    query_first: Annotated[Array | None, "int32 B T"] = None,
    scale: float,
    limit: Annotated[Array | int | None, "int32 []"] = None,
    block: Annotated[int, ">=1"] = 1024,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Attend with T queries to a cache: a query sees the tokens whose position is not after its own.

    The key and value of an empty slot may hold anything, NaN included. Training uses ``causal_attention``.

    Args:
        query: float32 or bfloat16.
        value: E need not be D.
        query_position: in tokens; -1 for a padding query, which sees nothing.
        key_position: in tokens; -1 where the slot is empty. Any order, may differ per head.
        query_first: the first position that each query sees, in tokens; None: all from 0 on.
        limit: may be traced. The caller knows that slots from ``limit`` on are empty or in the future of every query. None
            reads ``key_position`` once to find the last slot that a query sees.
        block: slots per step of the loop; bounds the logits in memory at B * H * G * T * block * 4 bytes.
        implementation: "cudnn" is flash attention, which needs neither ``limit`` nor ``block``; bfloat16 or float16, several
            queries, E as D, B * H * S * max(T, 2 * D) at most 2^28.

    Returns:
        out [B, H, G, T, E] in the dtype of the query, and lse float32 [B, H, G, T], the log of the softmax
        denominator; 0 and -inf for a query that sees nothing.
    """
    return forward(block=min(block, key.shape[2]))
