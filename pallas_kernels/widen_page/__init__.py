"""The newest key of every row widens the bounds of its page (Quest's index, maintained), in one launch."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.host import Rows
from pallas_kernels.widen_page import pallas_triton, reference

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
    """Bounds with slot ``cursor - 1`` taken in; a key that was taken in before changes nothing.

    Args:
        key: [B, H, S, D]; with ``rows`` the copies [B, H, R, D].
        position: int32 [B, H, S]; a slot holds something where it is at least 0, and one that does not changes nothing.
        cursor: int32 [B].
        low: [B, H, P, D] in the dtype of the key; NaN in a page that holds nothing.
        high: likewise. Both are rewritten in place where the caller gives them up.
        page_size: slots per page.
        rows: of an offloaded cache, whose copies ``key`` then has; None where ``key`` has all slots.
        implementation: "pallas_triton" (GPU; D a power of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

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
