"""For every slot the newest other slot whose key is near its own, without the map of all cosines (RKV)."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.score.rkv.newest_repeat import pallas_triton, reference
from pallas_kernels.signature import INTEGERS, declared, forward

NEWEST_REPEAT = Operation.of("newest_repeat", pallas_triton, reference)


@declared(NEWEST_REPEAT, derivative=INTEGERS)
def newest_repeat(
    key: Annotated[Array, "B H S D"],
    valid: Annotated[Array, "bool B H S"],
    *,
    threshold: Annotated[Array | float, "float32 []"],
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Find for each slot of a KV head the highest other slot whose key has a product with its own above ``threshold``.

    Slots are compared from the highest back, and only until all have found one: at most 2 S^2 D floating-point operations per
    KV head, far fewer where many keys repeat each other.

    Args:
        key: of norm 1 if products are to be cosines; empty slots may hold anything.
        threshold: at least 0; may be traced.
        implementation: "pallas_triton" takes D a power of two from 16 to 256.

    Returns:
        int32 [B, H, S]; 0 where no slot is near, and for empty slots.
    """
    return forward()
