"""Values of tokens by a few channels of their keys, and how many tokens come near the largest logit (InfiniGen)."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.score.partial_score import pallas_triton, reference

__all__ = ["PARTIAL_SCORE", "partial_score"]

PARTIAL_SCORE = Operation(
    "partial_score",
    {
        "pallas_triton": Implementation(pallas_triton.partial_score, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.partial_score),
    },
)


def partial_score(
    query: jax.Array,
    key: jax.Array,
    position: jax.Array,
    cursor: jax.Array,
    alpha: jax.Array,
    *,
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Score the tokens before the newest one by partial keys, and count those whose logits come near the largest.

    With ``e[h, g, s] = scale * query[h, g] . key[h, :, s]`` over the stored tokens s before the newest::

        score[h, s] = mean over g of e[h, g, s]
        near        = number of (h, g, s) with  e[h, g, s] >= max over s of e[h, g, s] - alpha

    Differentiable: through ``xla``, except for the counts.

    Args:
        query: [B, H, G, C], floating point.
        key: [B, H, C, N], same dtype, N at least S; empty slots may hold anything, and so may those from S on. The kernels
            are fast where N is a multiple of 16.
        position: int32 [B, H, S], negative for an empty slot.
        cursor: int32 [B], the slot behind the newest token.
        alpha: float32 [].
        scale: factor of the products, a Python number.
        implementation: "pallas_triton" (GPU; C up to 256, G up to 32), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        score float32 [B, H, S], finite for a token before the newest, inf for the newest and -inf for an empty slot; near
        int32 [B]; and the number of tokens before the newest, int32 [B, H].

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    check_arrays("partial_score", query, key, position, cursor, alpha)
    return PARTIAL_SCORE.run(
        query, key, position, cursor, alpha, scale=scale, implementation=implementation, platform=platform
    )


def check_arrays(
    name: str, query: jax.Array, key: jax.Array, position: jax.Array, cursor: jax.Array, alpha: jax.Array
) -> None:
    """Raise the errors of `partial_score` in the name of the operation ``name``."""
    agree = query.ndim == key.ndim == 4 and key.shape[:3] == (*query.shape[:2], query.shape[3])
    agree = agree and position.shape[:2] == key.shape[:2] and position.ndim == 3 and position.shape[2] <= key.shape[3]
    if not agree or (cursor.shape, alpha.shape) != (key.shape[:1], ()):
        raise ValueError(
            f"{name}: got query {query.shape}, key {key.shape}, position {position.shape}, cursor {cursor.shape}, "
            f"alpha {alpha.shape}, expected [B, H, G, C], [B, H, C, N], [B, H, S], [B], [], N at least S"
        )
    dtypes = [str(x.dtype) for x in (query, key, position, cursor, alpha)]
    if dtypes != [dtypes[0], dtypes[0], "int32", "int32", "float32"]:
        raise ValueError(f"{name}: got {dtypes}, expected keys as the query ({dtypes[0]}), int32 twice and float32")
