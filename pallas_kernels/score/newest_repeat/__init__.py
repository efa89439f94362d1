"""For every slot the newest other slot whose key is near its own, without the map of all cosines (RKV)."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.score.newest_repeat import pallas_triton, reference

__all__ = ["NEWEST_REPEAT", "newest_repeat"]

NEWEST_REPEAT = Operation(
    "newest_repeat",
    {
        "pallas_triton": Implementation(pallas_triton.newest_repeat, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.newest_repeat),
    },
)


def newest_repeat(
    key: jax.Array,
    valid: jax.Array,
    *,
    threshold: jax.Array | float,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Find for each slot of a KV head the highest other slot whose key has a product with its own above ``threshold``.

    Slots are compared from the highest back, and only until all have found one: at most 2 S^2 D floating-point operations per
    KV head, far fewer where many keys repeat each other.

    Not differentiable: its results are integers and truth values.

    Args:
        key: [B, H, S, D], of norm 1 if products are to be cosines; empty slots may hold anything.
        valid: bool [B, H, S].
        threshold: float32, at least 0; may be traced.
        implementation: "pallas_triton" (GPU; D a power of two from 16 to 256), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        int32 [B, H, S]; 0 where no slot is near, and for empty slots.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    if key.ndim != 4 or valid.shape != key.shape[:3] or valid.dtype != bool:
        raise ValueError(
            f"newest_repeat: got key {key.shape} and valid {valid.dtype} {valid.shape}, expected [B, H, S, D] and "
            "bool [B, H, S]"
        )
    return NEWEST_REPEAT.run(key, valid, threshold=threshold, implementation=implementation, platform=platform)
