"""Attention of a prompt chunk over the tokens stored before it: every query sees all of the first slots of its row."""

from __future__ import annotations

import jax

from pallas_kernels._cudnn import check
from pallas_kernels.attend.past_attention import cudnn, reference
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["PAST_ATTENTION", "past_attention"]

PAST_ATTENTION = Operation(
    "past_attention",
    {
        "cudnn": Implementation(cudnn.past_attention, ("gpu",), check),
        "xla": Implementation(reference.past_attention),
    },
    logits=True,
)


def past_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    count: jax.Array,
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with T queries to the first slots of a cache, which all hold a token.

    It is the part of ``prefix_attention`` before the chunk, for a chunk whose own tokens are not in this cache.

    Not differentiable: ``xla`` loops over blocks of keys up to a traced bound.

    Args:
        query: [B, H, G, T, D], already rotated; float32, bfloat16 or float16.
        key: [B, H, S, D], same dtype.
        value: [B, H, S, D], same dtype.
        count: int32 [B] in [0, S], the slots that the row's queries see; other slots may hold any finite value.
        scale: factor of the logits.
        implementation: "cudnn" (flash attention; GPU, bfloat16 or float16), "xla" (blocks of keys), or None.
        platform: see ``Operation.run``.

    Returns:
        out [B, H, G, T, D] in the dtype of the query, and lse float32 [B, H, G, T], the log of the softmax denominator; 0
        and -inf in a row that sees no slot.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    if (
        query.ndim != 5
        or key.shape != (*query.shape[:2], *key.shape[2:3], query.shape[4])
        or value.shape != key.shape
        or count.shape != query.shape[:1]
    ):
        raise ValueError(
            f"past_attention: got query {query.shape}, key {key.shape}, value {value.shape}, count {count.shape}, expected "
            "[B, H, G, T, D], [B, H, S, D], [B, H, S, D], [B]"
        )
    if not query.dtype == key.dtype == value.dtype:
        dtypes = [str(x.dtype) for x in (query, key, value)]
        raise ValueError(f"past_attention: got dtypes {dtypes}, expected the same dtype")
    arrays = query, key, value
    return PAST_ATTENTION.run(*arrays, count=count, scale=scale, implementation=implementation, platform=platform)
