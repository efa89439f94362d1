"""Scores of pages for the query of a decode step: Quest's bounds, or products with one vector per page."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.score.page_score import pallas_tpu, pallas_triton, reference

__all__ = ["PAGE_SCORE", "page_score"]

PAGE_SCORE = Operation(
    "page_score",
    {
        "pallas_triton": Implementation(pallas_triton.page_score, ("gpu",), pallas_triton.check),
        "pallas_tpu": Implementation(pallas_tpu.page_score, ("tpu",), pallas_tpu.check),
        "xla": Implementation(reference.page_score),
    },
)


def page_score(
    query: jax.Array,
    low: jax.Array,
    high: jax.Array | None,
    limit: jax.Array,
    *,
    page_size: int = 1,
    added: jax.Array | None = None,
    reduce: str = "max",
    newest: bool = False,
    position: jax.Array | None = None,
    first: int = 0,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Score of every page for every KV head, products and sums in float32.

    With bounds of a page's keys, the score is the largest product that a key between them could have (Quest,
    arXiv:2406.10774)::

        score[p] = reduce over g of  sum over c of  max(query[g, c] * low[p, c], query[g, c] * high[p, c])

    With ``high=None`` it is the plain product with ``low``. Pages that are not in use may hold anything.

    A page of one slot is a token: with ``position`` and ``first`` only the tokens between two slots are scored
    (RetrievalAttention, arXiv:2409.10516).

    Differentiable: through ``xla``.

    Args:
        query: [B, H, G, D], floating point.
        low: [B, H, P, D], floating point; may differ from the query in dtype.
        high: as ``low``, or None.
        limit: int32 [B] or [B, H], slots in use; the last page in use may be incomplete.
        page_size: slots per page.
        added: float32 [B, H, G, D], added to the query in float32 before the products; or None.
        reduce: how the query heads of a group are joined, "max" or "sum"; or "each", which keeps them apart.
        newest: whether the last page in use scores inf in any case.
        position: int32 [B, H, P], below 0 for a page that holds nothing and scores -inf; only for "each". Or None.
        first: the pages before it score -inf; only for "each".
        implementation: "pallas_triton" (GPU; D a power of two), "pallas_tpu" (TPU; D a multiple of 128, P of 8; not for
            "each"), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        float32 [B, H, P], or [B, H, G, P] of each query head; -inf for pages that are not in use, hold nothing or come before
        ``first``, and for a page without a token, whose bounds are inf and -inf, or NaN.

    Raises:
        ValueError: shapes or dtypes disagree, or ``reduce`` or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    shape = (*query.shape[:2], low.shape[2] if low.ndim == 4 else -1, query.shape[-1])
    agree = query.ndim == 4 and low.shape == shape and (high is None or high.shape == shape)
    if not agree or limit.shape not in (shape[:1], shape[:2]):
        raise ValueError(
            f"page_score: got query {query.shape}, low {low.shape}, high {None if high is None else high.shape}, "
            f"limit {limit.shape}, expected [B, H, G, D], [B, H, P, D], the same or None, [B] or [B, H]"
        )
    if limit.dtype != "int32" or (high is not None and high.dtype != low.dtype):
        raise ValueError(
            f"page_score: got low {low.dtype}, high {None if high is None else high.dtype}, limit {limit.dtype}, "
            "expected equal bounds and int32"
        )
    if added is not None and (added.shape != query.shape or added.dtype != "float32"):
        raise ValueError(f"page_score: got added {added.dtype} {added.shape}, expected float32 {query.shape}")
    if reduce not in ("max", "sum", "each"):
        raise ValueError(f"page_score: reduce must be 'max', 'sum' or 'each', got {reduce!r}")
    if position is not None and (position.shape != low.shape[:3] or position.dtype != "int32"):
        raise ValueError(f"page_score: got position {position.dtype} {position.shape}, expected int32 {low.shape[:3]}")
    if reduce != "each" and (position is not None or first):
        raise ValueError(f"page_score: position and first need reduce='each', got {reduce!r}")
    if page_size < 1:
        raise ValueError(f"page_score: page_size must be at least 1 slot, got {page_size}")
    return PAGE_SCORE.run(
        query,
        low,
        high,
        limit,
        page_size=page_size,
        added=added,
        reduce=reduce,
        newest=newest,
        position=position,
        first=first,
        implementation=implementation,
        platform=platform,
    )
