"""Soft vote of all heads for the tokens that they attend to together (TokenSelect)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.score.token_vote import pallas_triton, reference

__all__ = ["TOKEN_VOTE", "token_vote"]

TOKEN_VOTE = Operation(
    "token_vote",
    {
        "pallas_triton": Implementation(pallas_triton.token_vote, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.token_vote),
    },
)


def token_vote(
    query: jax.Array,
    key: jax.Array,
    *,
    start: jax.Array | int,
    stop: jax.Array,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Sum over all query heads of the softmax of ``query . key`` over the candidates ``start <= t < stop``.

    Votes decide which tokens are selected, so they are float32 throughout. On the GPU too: there the query is divided into
    bfloat16 parts, whose products with bfloat16 keys are exact. Keys that are no candidates never enter, and may hold
    anything, NaN included. A batch without any candidate costs next to nothing, so callers need no conditional around it.

    Source: Wu et al., "TokenSelect" (arXiv:2411.02886), head soft vote.

    Differentiable: through ``xla``.

    Args:
        query: float32 or bfloat16 [B, H, G, D]. The logits have no factor 1 / sqrt(D).
        key: float32, float16 or bfloat16 [B, H, S, D].
        start: first candidate, int32 [B] or a Python int, not negative.
        stop: int32 [B], end of the candidates; clamped to S. A row whose stop is not above its start has none.
        implementation: "pallas_triton" (GPU; D a power of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``. ``TOKEN_VOTE.resolve`` tells which implementation a call uses.

    Returns:
        float32 [B, S], -inf outside ``[start, stop)``; the votes of a row with candidates sum to H * G.

    Raises:
        ValueError: shapes, or the dtypes of start and stop, disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    agree = query.ndim == key.ndim == 4 and key.shape == (*query.shape[:2], key.shape[2], query.shape[3])
    if not agree:
        raise ValueError(
            f"token_vote: got query {query.shape} and key {key.shape}, expected [B, H, G, D] and [B, H, S, D]"
        )
    for name, bound in (("start", start), ("stop", stop)):
        if name == "start" and isinstance(bound, int):
            continue
        if bound.shape != query.shape[:1] or bound.dtype != jnp.int32:
            raise ValueError(
                f"token_vote: got {name} {bound.dtype} {bound.shape}, expected int32 [B] = {query.shape[:1]}"
            )
    return TOKEN_VOTE.run(query, key, start=start, stop=stop, implementation=implementation, platform=platform)
