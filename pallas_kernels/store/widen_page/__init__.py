"""Upkeep of Quest's index: the newest key of every row widens the bounds of its page."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.host import Rows
from pallas_kernels.store.widen_page import pallas_triton, reference

__all__ = ["WIDEN_PAGE", "widen_page"]

WIDEN_PAGE = Operation(
    "widen_page",
    {
        "pallas_triton": Implementation(pallas_triton.widen_page, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.widen_page),
    },
)


def widen_page(
    key: jax.Array,
    position: jax.Array,
    cursor: jax.Array,
    low: jax.Array,
    high: jax.Array,
    *,
    page_size: int,
    rows: Rows | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Widen the bounds of a page by the key in slot ``cursor - 1``; a key that is within the bounds changes nothing.

    Differentiable: through ``xla``.

    Args:
        key: [B, H, S, D]; with ``rows`` the copies [B, H, R, D].
        position: int32 [B, H, S], negative for an empty slot, which changes nothing.
        cursor: int32 [B], the slot behind the newest token.
        low: [B, H, P, D] in the dtype of the key, lower bounds; inf for a page without a token. Rewritten in place where the
            caller gives it up.
        high: [B, H, P, D], upper bounds, as ``low``; -inf for a page without a token.
        page_size: slots per page.
        rows: the rows of an offloaded cache, if ``key`` is its copies; None if ``key`` has all slots.
        implementation: "pallas_triton" (GPU; D a power of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        low and high.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    slots = (*key.shape[:2], key.shape[2] if rows is None else position.shape[2])
    pages = -(-slots[2] // page_size)
    bounds = (*key.shape[:2], pages, key.shape[3])
    got = [x.shape for x in (position, cursor, low, high)]
    if got != [slots, key.shape[:1], bounds, bounds] or not key.dtype == low.dtype == high.dtype:
        raise ValueError(
            f"widen_page: got position, cursor, low, high of {got}, {low.dtype} and {high.dtype}, expected "
            f"{[slots, key.shape[:1], bounds, bounds]}, {key.dtype} twice"
        )
    return WIDEN_PAGE.run(
        key,
        position,
        cursor,
        low,
        high,
        page_size=page_size,
        rows=rows,
        implementation=implementation,
        platform=platform,
    )
