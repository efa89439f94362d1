"""The tokens that a step attends to, by a few channels of their keys (InfiniGen)."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels.choose.partial_select import pallas_triton, reference
from pallas_kernels.choose.partial_select.reference import wanted
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.score.partial_score import check_arrays

__all__ = ["PARTIAL_SELECT", "partial_select", "wanted"]

PARTIAL_SELECT = Operation(
    "partial_select",
    {
        "pallas_triton": Implementation(pallas_triton.partial_select, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.partial_select),
    },
)


def partial_select(
    query: jax.Array,
    key: jax.Array,
    position: jax.Array,
    cursor: jax.Array,
    alpha: jax.Array,
    budget: jax.Array,
    *,
    scale: float,
    capacity: int,
    total: Callable[[jax.Array], jax.Array],
    query_heads: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """List the newest token of each KV head, and the best others by `partial_score`, in the order of their slots.

    With ``near`` of `partial_score` and the number ``stored`` of tokens before the newest, a list has so many tokens::

        1 + stored                                             where stored <= budget
        1 + min(total(near) // query_heads, budget)            elsewhere

    Of equal scores the lower slot is taken.

    Not differentiable: its results are integers and truth values.

    Args:
        query: as in `partial_score`, like ``key``, ``position``, ``cursor`` and ``alpha``.
        key: [B, H, C, N].
        position: int32 [B, H, S].
        cursor: int32 [B].
        alpha: float32 [].
        budget: int32 [], the most tokens besides the newest.
        scale: factor of the products, a Python number.
        capacity: static length K of the lists. Longer lists are cut: then the newest token may be missing.
        total: the sum of int32 [B] over all devices that have KV heads of a row; the identity if there is one.
        query_heads: on all of these devices together.
        implementation: "pallas_triton" (GPU; C up to 256, G up to 32, and what `kth_select` takes), "xla", or None for the
            first that runs.
        platform: see ``Operation.run``.

    Returns:
        slots int32 [B, H, K], the listed ones first and ascending, 0 behind them; and bool [B, H, K], true where a slot is
        listed.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    check_arrays("partial_select", query, key, position, cursor, alpha)
    if budget.shape or budget.dtype != "int32" or capacity < 1:
        raise ValueError(
            f"partial_select: got budget {budget.dtype} {budget.shape}, {capacity=}, expected int32 [] and at least 1"
        )
    return PARTIAL_SELECT.run(
        query,
        key,
        position,
        cursor,
        alpha,
        budget,
        scale=scale,
        capacity=capacity,
        total=total,
        query_heads=query_heads,
        implementation=implementation,
        platform=platform,
    )
