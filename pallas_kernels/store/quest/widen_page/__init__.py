"""Upkeep of Quest's index: the newest key of every row widens the bounds of its page."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.host import Rows
from pallas_kernels.signature import declared, forward
from pallas_kernels.store.quest.widen_page import pallas_mosaic_gpu, pallas_triton, reference

WIDEN_PAGE = Operation.of("widen_page", pallas_triton, pallas_mosaic_gpu, reference, in_place=True)


@declared(WIDEN_PAGE)
def widen_page(
    key: Annotated[Array, "B H S D; B H R D with rows"],
    position: Annotated[Array, "int32 B H S"],
    cursor: Annotated[Array, "int32 B"],
    low: Annotated[Array, "like key B H ceil(S/page_size) D"],
    high: Annotated[Array, "like low"],
    *,
    page_size: Annotated[int, ">=1"],
    rows: Rows | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Widen the bounds of a page by the key in slot ``cursor - 1``; a key that is within the bounds changes nothing.

    Args:
        key: with ``rows`` the copies.
        position: negative for an empty slot, which changes nothing.
        low: lower bounds; inf for a page without a token. Rewritten in place where the caller gives it up.
        high: upper bounds; -inf for a page without a token. Rewritten too.
        page_size: slots per page.
        implementation: "pallas_triton" takes D a power of two.

    Returns:
        low and high.
    """
    return forward()
