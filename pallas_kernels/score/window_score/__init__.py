"""Attention probability of every slot, summed over a window of queries, without the map of all probabilities (SnapKV)."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.score.window_score import pallas_triton, reference

__all__ = ["WINDOW_SCORE", "window_score"]

WINDOW_SCORE = Operation(
    "window_score",
    {
        "pallas_triton": Implementation(pallas_triton.window_score, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.window_score),
    },
    logits=True,
)


def window_score(
    query: jax.Array,
    key: jax.Array,
    *,
    query_position: jax.Array,
    key_position: jax.Array,
    scale: float,
    axis: str | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Sum the attention probability that each slot receives over a window of queries, for each query head.

    A query sees the tokens at its position or before; the softmax is over all of them, in float32. There are two passes over
    the keys. Logits are in memory for one block at a time, or never.

    Differentiable: through ``xla``.

    Args:
        query: [B, H, G, W, D].
        key: [B, H, S, D], same dtype; empty slots may hold anything.
        query_position: int32 [B, W], in tokens; -1 for a padding query, which adds nothing.
        key_position: int32 [B, H, S], in tokens; -1 where the slot is empty.
        scale: factor of the logits, a Python number.
        axis: of the mesh whose devices have parts of the slots of each row, inside `jax.shard_map`: the softmax is then over
            the slots of all of them, and the result is for this device's slots. None if all slots are here.
        implementation: "pallas_triton" (GPU; D a power of two, G * W at most 512), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        float32 [B, H, G, S]; 0 for empty slots. The sum over S is the number of queries that see a token.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    agree = (
        query.ndim == 5
        and key.ndim == 4
        and key.shape == (*query.shape[:2], key.shape[2], query.shape[4])
        and query_position.shape == (query.shape[0], query.shape[3])
        and key_position.shape == key.shape[:3]
    )
    if not agree:
        raise ValueError(
            f"window_score: got query {query.shape}, key {key.shape}, query_position {query_position.shape}, "
            f"key_position {key_position.shape}, expected [B, H, G, W, D], [B, H, S, D], [B, W], [B, H, S]"
        )
    dtypes = [str(x.dtype) for x in (key, query_position, key_position)]
    if dtypes != [str(query.dtype), "int32", "int32"]:
        raise ValueError(f"window_score: got {dtypes}, expected keys as the query ({query.dtype}) and int32 positions")
    return WINDOW_SCORE.run(
        query,
        key,
        query_position=query_position,
        key_position=key_position,
        scale=scale,
        axis=axis,
        implementation=implementation,
        platform=platform,
    )
