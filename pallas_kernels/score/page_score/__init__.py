"""Scores of pages for the query of a decode step, by bounds of their keys (Quest)."""

from typing import Annotated, Literal

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.score.page_score import pallas_mosaic_gpu, pallas_tpu, pallas_triton, reference
from pallas_kernels.signature import declared, forward

PAGE_SCORE = Operation.of("page_score", pallas_triton, pallas_mosaic_gpu, pallas_tpu, reference)


@declared(PAGE_SCORE)
def page_score(
    query: Annotated[Array, "floating B H G D"],
    low: Annotated[Array, "floating B H P D"],
    high: Annotated[Array, "like low"],
    limit: Annotated[Array, "int32 B or B H"],
    *,
    page_size: Annotated[int, ">=1"] = 1,
    reduce: Literal["max", "each"] = "max",
    newest: bool = False,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Score every page for every KV head by the largest product that a key between its bounds could have, in float32.

    It is an upper bound of the products with the page's keys (Quest, arXiv:2406.10774)::

        score[p] = reduce over g of  sum over c of  max(query[g, c] * low[p, c], query[g, c] * high[p, c])

    Pages that are not in use may hold anything.

    Args:
        low: may differ from the query in dtype.
        limit: slots in use; the last page in use may be incomplete.
        page_size: slots per page.
        reduce: how the query heads of a group are joined; "each" keeps them apart.
        newest: whether the last page in use scores inf in any case.
        implementation: "pallas_triton" takes D a power of two; "pallas_tpu" D a multiple of 128, P of 8, not "each".

    Returns:
        float32 [B, H, P], or [B, H, G, P] of each query head; -inf for pages that are not in use, and for a page without a
        token, whose bounds are inf and -inf, or NaN.
    """
    return forward()
