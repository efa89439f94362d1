"""The tokens of listed clusters as one list, with those at both ends of the row (RetroInfer)."""

from typing import Annotated

from jax import Array

from pallas_kernels.choose.retroinfer.cluster_tokens import pallas_triton, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import INTEGERS, declared, forward

CLUSTER_TOKENS = Operation.of("cluster_tokens", pallas_triton, reference)


@declared(CLUSTER_TOKENS, derivative=INTEGERS)
def cluster_tokens(
    listed: Annotated[Array, "int32 B H K"],
    ends: Annotated[Array, "int32 B H K"],
    start: Annotated[Array, "int32 B H C"],
    order: Annotated[Array, "int32 B H S"],
    near: Annotated[Array, "int32 B"],
    count: Annotated[Array, "int32 B"],
    *,
    first: int,
    most: int,
    newest: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """List the first slots of a row, the slots of the tokens of listed clusters, and the slots from ``near`` on.

    Args:
        listed: clusters.
        ends: tokens to list of the clusters up to each entry: entry i lists ``ends[i] - ends[i - 1]``.
        start: where the tokens of each cluster begin in ``order``.
        order: slots, cluster by cluster.
        near: a slot.
        count: slots of the row that hold a token, the first ones.
        first: static, how many of the first slots are listed.
        most: static, entries for tokens of clusters; what does not fit is left out.
        newest: static, entries for slots from ``near`` on.

    Returns:
        slots int32 [B, H, first + most + newest] and whether each is listed, bool of this shape; 0 where none is.
    """
    return forward()
