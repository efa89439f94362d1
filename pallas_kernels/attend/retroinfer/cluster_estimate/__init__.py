"""Attention to clusters of tokens through their sums of values (RetroInfer)."""

from typing import Annotated

from jax import Array

from pallas_kernels.attend.retroinfer.cluster_estimate import pallas_triton, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import declared, forward

CLUSTER_ESTIMATE = Operation.of("cluster_estimate", pallas_triton, reference)


@declared(CLUSTER_ESTIMATE)
def cluster_estimate(
    logits: Annotated[Array, "float32 B H G C"],
    chosen: Annotated[Array, "bool B H C"],
    left_out: Annotated[Array, "bool B H C"],
    size: Annotated[Array, "int32 B H C"],
    value_sum: Annotated[Array, "B H C D"],
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Attend as if all tokens of a cluster had one logit: exp(logit) weighs its size, and the sum of its values.

    The result has N parts, and each cluster enters one part; `pallas_kernels.numerics.merge_partials` joins them.
    Clusters that are not chosen may hold anything.

    Args:
        left_out: clusters that are not chosen even where ``chosen``.
        size: tokens of each cluster, at least 1 where it is chosen.
        implementation: "pallas_triton" reads the sums of chosen clusters only; D a power of two.

    Returns:
        out float32 [B, H, N, G, D] and lse float32 [B, H, N, G], the log of the softmax denominator; 0 and -inf where a part
        has no chosen cluster.
    """
    return forward()
