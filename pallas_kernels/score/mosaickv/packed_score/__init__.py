"""Products of queries with packed vectors (MosaicKV), see `pallas_kernels.formats.packed_vectors`."""

from typing import Annotated, Literal

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.score.mosaickv.packed_score import pallas_mosaic_gpu, reference
from pallas_kernels.signature import declared, forward

PACKED_SCORE = Operation.of("packed_score", pallas_mosaic_gpu, reference)


@declared(PACKED_SCORE)
def packed_score(
    parts: Annotated[Array, "B H M G N D"],
    values: Annotated[Array, "like parts B H P _"],
    bitmap: Annotated[Array, "int32|uint8 B H P _"],
    count: Annotated[Array, "int32 B"],
    last: Annotated[Array, "int32 B"],
    *,
    span: int,
    unit: int = 1,
    owner: Annotated[Array | None, "int32 B P"] = None,
    reduce: Literal["max", "mean"] | None = "max",
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Multiply queries with packed vectors, each in the basis of its own segment.

    Args:
        parts: made by `project_query`.
        values: r values of each vector; a vector with fewer than r bits has zeros behind its values.
        bitmap: int32 [B, H, P, D/32], or uint8 [B, H, P, D/8] if D is no multiple of 32; at most r bits per vector.
        count: ``unit`` times the number of vectors; entries behind them may hold anything.
        last: the highest segment. Without ``owner``, vector p has segment ``min(p // span, last)``.
        span: vectors per segment.
        unit: how much one vector adds to ``count``; a remainder is dropped.
        owner: the segment of every vector, ascending; or None.
        reduce: over the G query heads, or None for the scores of every head.

    Returns:
        float32 [B, H, P], or [B, H, G, P] if ``reduce`` is None; -inf behind the last vector.
    """
    return forward()
