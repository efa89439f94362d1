"""Attention probability of every slot, summed over a window of queries, without the map of all probabilities (SnapKV)."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.score.window_score import pallas_triton, reference
from pallas_kernels.signature import declared, forward

WINDOW_SCORE = Operation.of("window_score", pallas_triton, reference, logits=True)


@declared(WINDOW_SCORE)
def window_score(
    query: Annotated[Array, "B H G W D"],
    key: Annotated[Array, "like query B H S D"],
    *,
    query_position: Annotated[Array, "int32 B W"],
    key_position: Annotated[Array, "int32 B H S"],
    scale: float,
    axis: str | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Sum the attention probability that each slot receives over a window of queries, for each query head.

    A query sees the tokens at its position or before; the softmax is over all of them, in float32. There are two passes over
    the keys. Logits are in memory for one block at a time, or never.

    Args:
        key: empty slots may hold anything.
        query_position: in tokens; -1 for a padding query, which adds nothing.
        key_position: in tokens; -1 where the slot is empty.
        axis: of the mesh whose devices have parts of the slots of each row, inside `jax.shard_map`: the softmax is then over
            the slots of all of them, and the result is for this device's slots. None if all slots are here.
        implementation: "pallas_triton" takes D a power of two, G * W at most 512.

    Returns:
        float32 [B, H, G, S]; 0 for empty slots. The sum over S is the number of queries that see a token.
    """
    return forward()
