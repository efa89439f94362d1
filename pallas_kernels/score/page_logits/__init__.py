"""Logits of pages that have one vector each, for the query of a decode step, and their softmax denominators."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.score.page_logits import pallas_triton, reference
from pallas_kernels.signature import declared, forward

PAGE_LOGITS = Operation.of("page_logits", pallas_triton, reference, logits=True)


@declared(PAGE_LOGITS)
def page_logits(
    query: Annotated[Array, "floating B H G D"],
    vector: Annotated[Array, "like query B H P D"],
    limit: Annotated[Array, "int32 B"],
    *,
    scale: float,
    held: Annotated[Array | None, "bool B H P"] = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Compute the logit of each page for each query head, and the log of the sum of their exponentials, in parts.

    ``logits[g, p] - log(sum over n of exp(lse[n, g]))`` is the log of a softmax over the pages; `kth_select` takes both.

    Args:
        vector: pages that are not in use or not held may hold anything.
        limit: the pages in use are those before; clipped to [0, P]. Vectors behind them are not read.
        scale: factor of the products, a Python number.
        held: False for a page that does not take part; or None, if all pages in use do.
        implementation: "pallas_triton" takes D a power of two.

    Returns:
        Logits float32 [B, H, G, P], -inf for a page that does not take part, and for a product of NaN; and lse float32
        [B, H, N, G], where each page is in one of the N parts.
    """
    return forward()
