"""The clusters that a query attends to exactly, and those that it estimates (RetroInfer)."""

from typing import Annotated

from jax import Array

from pallas_kernels.choose.retroinfer.cluster_rank import pallas_triton, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import declared, forward

CLUSTER_RANK = Operation.of("cluster_rank", pallas_triton, reference)


@declared(CLUSTER_RANK, derivative="through ``xla``, the logits only")
def cluster_rank(
    query: Annotated[Array, "B H G D"],
    centroid: Annotated[Array, "like query B H C D"],
    size: Annotated[Array, "int32 B H C"],
    used: Annotated[Array, "int32 B"],
    best: Annotated[Array, "float32 []"],
    considered: Annotated[Array, "float32 []"],
    *,
    scale: float,
    capacity: Annotated[int, ">=1"],
    room: Annotated[int, ">=1"],
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """Rank the clusters of each KV head by the attention that its query heads pay to them together.

    The score of a cluster is the sum over the group of a softmax over the clusters in use. Clusters without a token are never
    chosen; of equal scores the lower cluster is better. The first ``best`` of the clusters are listed. In the order of their
    scores they have room until their tokens are more than ``room``: from this cluster on none has. Of the first
    ``considered``, those that have no room are to be estimated.

    Args:
        size: tokens of each cluster.
        used: number of clusters in use, which come first; clusters behind them may hold anything.
        best: a share of the clusters in use, see `pallas_kernels.numerics.ceil_share`.
        considered: a share of the clusters in use, at least ``best``.
        capacity: static length K of the lists. At most so many clusters are listed.
        room: tokens.
        implementation: "pallas_triton" takes D a power of two, C up to 16384.

    Returns:
        Logits float32 [B, H, G, C], anything for clusters that are not in use; the listed clusters int32 [B, H, K], ascending
        and 0 behind them; how many tokens of clusters with room there are up to each entry, int32 [B, H, K]; the first
        ``considered`` clusters, bool [B, H, C]; and the listed clusters that have room, bool [B, H, C].
    """
    return forward()
