"""The tokens of listed clusters as one list, with those at both ends of the row (RetroInfer)."""

from __future__ import annotations

import jax

from pallas_kernels.choose.cluster_tokens import pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["CLUSTER_TOKENS", "cluster_tokens"]

CLUSTER_TOKENS = Operation(
    "cluster_tokens",
    {
        "pallas_triton": Implementation(pallas_triton.cluster_tokens, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.cluster_tokens),
    },
)


def cluster_tokens(
    listed: jax.Array,
    ends: jax.Array,
    start: jax.Array,
    order: jax.Array,
    near: jax.Array,
    count: jax.Array,
    *,
    first: int,
    most: int,
    newest: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """List the first slots of a row, the slots of the tokens of listed clusters, and the slots from ``near`` on.

    Not differentiable: its results are integers and truth values.

    Args:
        listed: int32 [B, H, K], clusters.
        ends: int32 [B, H, K], tokens to list of the clusters up to each entry: entry i lists ``ends[i] - ends[i - 1]``.
        start: int32 [B, H, C], where the tokens of each cluster begin in ``order``.
        order: int32 [B, H, S], slots, cluster by cluster.
        near: int32 [B], a slot.
        count: int32 [B], slots of the row that hold a token, the first ones.
        first: static, how many of the first slots are listed.
        most: static, entries for tokens of clusters; what does not fit is left out.
        newest: static, entries for slots from ``near`` on.
        implementation: "pallas_triton" (GPU), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        slots int32 [B, H, first + most + newest] and whether each is listed, bool of this shape; 0 where none is.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    shape = listed.shape[:2]
    agree = listed.ndim == start.ndim == order.ndim == 3 and ends.shape == listed.shape
    if not agree or not start.shape[:2] == order.shape[:2] == shape or not near.shape == count.shape == shape[:1]:
        raise ValueError(
            f"cluster_tokens: got listed {listed.shape}, ends {ends.shape}, start {start.shape}, order {order.shape}, near "
            f"{near.shape}, count {count.shape}, expected [B, H, K], [B, H, K], [B, H, C], [B, H, S], [B] and [B]"
        )
    dtypes = {str(x.dtype) for x in (listed, ends, start, order, near, count)}
    if dtypes != {"int32"}:
        raise ValueError(f"cluster_tokens: got arrays of {sorted(dtypes)}, expected int32")
    return CLUSTER_TOKENS.run(
        listed,
        ends,
        start,
        order,
        near,
        count,
        first=first,
        most=most,
        newest=newest,
        implementation=implementation,
        platform=platform,
    )
