"""The tokens that a step attends to, by a few channels of their keys (InfiniGen)."""

from collections.abc import Callable
from typing import Annotated

from jax import Array

from pallas_kernels.choose.infinigen.partial_select import pallas_triton, reference
from pallas_kernels.choose.infinigen.partial_select.reference import wanted
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import INTEGERS, declared, forward

__all__ = ["PARTIAL_SELECT", "partial_select", "wanted"]

PARTIAL_SELECT = Operation.of("partial_select", pallas_triton, reference)


@declared(PARTIAL_SELECT, derivative=INTEGERS)
def partial_select(
    query: Annotated[Array, "floating B H G C"],
    key: Annotated[Array, "like query B H C N>=S"],
    position: Annotated[Array, "int32 B H S"],
    cursor: Annotated[Array, "int32 B"],
    alpha: Annotated[Array, "float32 []"],
    budget: Annotated[Array, "int32 []"],
    *,
    scale: float,
    capacity: Annotated[int, ">=1"],
    total: Callable[[Array], Array],
    query_heads: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """List the newest token of each KV head, and the best others by `partial_score`, in the order of their slots.

    With ``near`` of `partial_score` and the number ``stored`` of tokens before the newest, a list has so many tokens::

        1 + stored                                             where stored <= budget
        1 + min(total(near) // query_heads, budget)            elsewhere

    Of equal scores the lower slot is taken.

    Args:
        query: as in `partial_score`, like ``key``, ``position``, ``cursor`` and ``alpha``.
        budget: the most tokens besides the newest.
        scale: factor of the products, a Python number.
        capacity: static length K of the lists. Longer lists are cut: then the newest token may be missing.
        total: the sum of int32 [B] over all devices that have KV heads of a row; the identity if there is one.
        query_heads: on all of these devices together.
        implementation: "pallas_triton" takes C up to 256, G up to 32, and what `kth_select` takes.

    Returns:
        slots int32 [B, H, K], the listed ones first and ascending, 0 behind them; and bool [B, H, K], true where a slot is
        listed.
    """
    return forward()
