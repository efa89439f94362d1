"""Soft vote of all heads for the tokens that they attend to together (TokenSelect)."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.score.tokenselect.token_vote import pallas_mosaic_gpu, pallas_triton, reference
from pallas_kernels.signature import declared, forward

TOKEN_VOTE = Operation.of("token_vote", pallas_triton, pallas_mosaic_gpu, reference)


@declared(TOKEN_VOTE)
def token_vote(
    query: Annotated[Array, "B H G D"],
    key: Annotated[Array, "B H S D"],
    *,
    start: Annotated[Array | int, "int32 [] or B"],
    stop: Annotated[Array, "int32 B"],
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Sum over all query heads of the softmax of ``query . key`` over the candidates ``start <= t < stop``.

    Votes decide which tokens are selected, so they are float32 throughout. On the GPU too: there the query is divided into
    bfloat16 parts, whose products with bfloat16 keys are exact. Keys that are no candidates never enter, and may hold
    anything, NaN included. A batch without any candidate costs next to nothing, so callers need no conditional around it.

    Source: Wu et al., "TokenSelect" (arXiv:2411.02886), head soft vote.

    Args:
        query: float32 or bfloat16. The logits have no factor 1 / sqrt(D).
        key: float32, float16 or bfloat16.
        start: first candidate, not negative.
        stop: end of the candidates; clamped to S. A row whose stop is not above its start has none.
        implementation: "pallas_triton" takes D a power of two.

    Returns:
        float32 [B, S], -inf outside ``[start, stop)``; the votes of a row with candidates sum to H * G.
    """
    return forward()
