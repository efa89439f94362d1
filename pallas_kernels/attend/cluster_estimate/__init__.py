"""Attention to clusters of tokens through their sums of values (RetroInfer)."""

from __future__ import annotations

import jax

from pallas_kernels.attend.cluster_estimate import pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["CLUSTER_ESTIMATE", "cluster_estimate"]

CLUSTER_ESTIMATE = Operation(
    "cluster_estimate",
    {
        "pallas_triton": Implementation(pallas_triton.cluster_estimate, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.cluster_estimate),
    },
)


def cluster_estimate(
    logits: jax.Array,
    chosen: jax.Array,
    left_out: jax.Array,
    size: jax.Array,
    value_sum: jax.Array,
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend as if all tokens of a cluster had one logit: exp(logit) weighs its size, and the sum of its values.

    The result has N parts, and each cluster enters one part; `pallas_kernels.numerics.merge_partials` joins them.
    Clusters that are not chosen may hold anything.

    Differentiable: through ``xla``.

    Args:
        logits: float32 [B, H, G, C].
        chosen: bool [B, H, C].
        left_out: bool [B, H, C], clusters that are not chosen even where ``chosen``.
        size: int32 [B, H, C], tokens of each cluster, at least 1 where it is chosen.
        value_sum: [B, H, C, D].
        implementation: "pallas_triton" (GPU; D a power of two; reads the sums of chosen clusters only), "xla", or None for
            the first that runs.
        platform: see ``Operation.run``.

    Returns:
        out float32 [B, H, N, G, D] and lse float32 [B, H, N, G], the log of the softmax denominator; 0 and -inf where a part
        has no chosen cluster.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    shape = chosen.shape
    agree = logits.ndim == value_sum.ndim == 4 and len(shape) == 3 and left_out.shape == size.shape == shape
    if not agree or value_sum.shape[:3] != shape or logits.shape != (*shape[:2], logits.shape[2], shape[2]):
        raise ValueError(
            f"cluster_estimate: got logits {logits.shape}, chosen {shape}, left_out {left_out.shape}, size {size.shape}, "
            f"value_sum {value_sum.shape}, expected [B, H, G, C], three of [B, H, C], and [B, H, C, D]"
        )
    dtypes = [str(x.dtype) for x in (logits, chosen, left_out, size)]
    if dtypes != ["float32", "bool", "bool", "int32"]:
        raise ValueError(
            f"cluster_estimate: got logits, chosen, left_out, size of {dtypes}, expected float32, bool, bool and int32"
        )
    return CLUSTER_ESTIMATE.run(logits, chosen, left_out, size, value_sum, implementation=implementation, platform=platform)
