"""Logits of pages that have one vector each, for the query of a decode step, and their softmax denominators."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.score.page_logits import pallas_triton, reference

__all__ = ["PAGE_LOGITS", "page_logits"]

PAGE_LOGITS = Operation(
    "page_logits",
    {
        "pallas_triton": Implementation(pallas_triton.page_logits, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.page_logits),
    },
    logits=True,
)


def page_logits(
    query: jax.Array,
    vector: jax.Array,
    limit: jax.Array,
    *,
    scale: float,
    held: jax.Array | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute the logit of each page for each query head, and the log of the sum of their exponentials, in parts.

    ``logits[g, p] - log(sum over n of exp(lse[n, g]))`` is the log of a softmax over the pages; `kth_select` takes both.

    Differentiable: through ``xla``.

    Args:
        query: [B, H, G, D], floating point.
        vector: [B, H, P, D], same dtype; pages that are not in use or not held may hold anything.
        limit: int32 [B], the pages in use are those before; clipped to [0, P]. Vectors behind them are not read.
        scale: factor of the products, a Python number.
        held: bool [B, H, P], False for a page that does not take part; or None, if all pages in use do.
        implementation: "pallas_triton" (GPU; D a power of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        Logits float32 [B, H, G, P], -inf for a page that does not take part, and for a product of NaN; and lse float32
        [B, H, N, G], where each page is in one of the N parts.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    agree = query.ndim == vector.ndim == 4 and vector.shape == (*query.shape[:2], vector.shape[2], query.shape[3])
    if not agree or limit.shape != query.shape[:1] or (held is not None and held.shape != vector.shape[:3]):
        raise ValueError(
            f"page_logits: got query {query.shape}, vector {vector.shape}, limit {limit.shape}, "
            f"held {None if held is None else held.shape}, expected [B, H, G, D], [B, H, P, D], [B], [B, H, P] or None"
        )
    dtypes = [str(x.dtype) for x in (query, vector, limit)]
    if dtypes != [dtypes[0], dtypes[0], "int32"] or (held is not None and held.dtype != "bool"):
        raise ValueError(
            f"page_logits: got query, vector, limit of {dtypes}, held {None if held is None else held.dtype}, expected one "
            "dtype for the first two, int32, and bool or None"
        )
    return PAGE_LOGITS.run(query, vector, limit, held, scale=scale, implementation=implementation, platform=platform)
