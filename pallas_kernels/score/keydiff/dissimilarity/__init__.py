"""How far the direction of each stored key is from the mean direction of its head: the score of KeyDiff."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.score.keydiff.dissimilarity import pallas_triton, reference
from pallas_kernels.signature import declared, forward

DISSIMILARITY = Operation.of("dissimilarity", pallas_triton, reference)


@declared(DISSIMILARITY)
def dissimilarity(
    key: Annotated[Array, "floating B H S D"],
    position: Annotated[Array, "int32 B H S"],
    *,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Compute minus the cosine of every stored key and the mean direction of the stored keys, in float32.

    Args:
        key: empty slots may hold anything, NaN included.
        implementation: "pallas_triton" is two kernels; D a power of two.

    Returns:
        float32 [B, H, S]; 0 for empty slots.
    """
    return forward()
