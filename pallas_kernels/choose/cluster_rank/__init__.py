"""The clusters that a query attends to exactly, and those that it estimates (RetroInfer)."""

from __future__ import annotations

import jax

from pallas_kernels.choose.cluster_rank import pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["CLUSTER_RANK", "cluster_rank"]

CLUSTER_RANK = Operation(
    "cluster_rank",
    {
        "pallas_triton": Implementation(pallas_triton.cluster_rank, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.cluster_rank),
    },
)


def cluster_rank(
    query: jax.Array,
    centroid: jax.Array,
    size: jax.Array,
    used: jax.Array,
    best: jax.Array,
    considered: jax.Array,
    *,
    scale: float,
    capacity: int,
    room: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rank the clusters of each KV head by the attention that its query heads pay to them together.

    The score of a cluster is the sum over the group of a softmax over the clusters in use. Clusters without a token are never
    chosen; of equal scores the lower cluster is better. The first ``best`` of the clusters are listed. In the order of their
    scores they have room until their tokens are more than ``room``: from this cluster on none has. Of the first
    ``considered``, those that have no room are to be estimated.

    Differentiable: through ``xla``, the logits only.

    Args:
        query: [B, H, G, D].
        centroid: [B, H, C, D], of the same dtype.
        size: int32 [B, H, C], tokens of each cluster.
        used: int32 [B], number of clusters in use, which come first; clusters behind them may hold anything.
        best: float32, a share of the clusters in use, see `pallas_kernels.numerics.ceil_share`.
        considered: float32, a share of the clusters in use, at least ``best``.
        scale: factor of the logits, a Python number.
        capacity: static length K of the lists. At most so many clusters are listed.
        room: tokens.
        implementation: "pallas_triton" (GPU; D a power of two, C up to 16384), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        Logits float32 [B, H, G, C], anything for clusters that are not in use; the listed clusters int32 [B, H, K], ascending
        and 0 behind them; how many tokens of clusters with room there are up to each entry, int32 [B, H, K]; the first
        ``considered`` clusters, bool [B, H, C]; and the listed clusters that have room, bool [B, H, C].

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    shape = centroid.shape[:3]
    agree = query.ndim == 4 and centroid.shape == (*query.shape[:2], *shape[2:], query.shape[3])
    if not agree or size.shape != shape or used.shape != shape[:1] or best.shape or considered.shape:
        raise ValueError(
            f"cluster_rank: got query {query.shape}, centroid {centroid.shape}, size {size.shape}, used {used.shape}, best "
            f"{best.shape}, considered {considered.shape}, expected [B, H, G, D], [B, H, C, D], [B, H, C], [B], [] and []"
        )
    dtypes = [str(x.dtype) for x in (query, centroid, size, used, best, considered)]
    expected = [dtypes[0]] * 2 + ["int32"] * 2 + ["float32"] * 2
    if dtypes != expected:
        raise ValueError(f"cluster_rank: got dtypes {dtypes}, expected {expected}")
    if capacity < 1 or room < 1:
        raise ValueError(f"cluster_rank: got {capacity=} and {room=}, expected at least 1")
    return CLUSTER_RANK.run(
        query,
        centroid,
        size,
        used,
        best,
        considered,
        scale=scale,
        capacity=capacity,
        room=room,
        implementation=implementation,
        platform=platform,
    )
