"""Products of queries with packed vectors (MosaicKV), see `pallas_kernels.formats.packed_vectors`."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.score.packed_score import pallas_triton, reference

__all__ = ["PACKED_SCORE", "packed_score"]

PACKED_SCORE = Operation(
    "packed_score",
    {
        "pallas_triton": Implementation(pallas_triton.packed_score, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.packed_score),
    },
)


def packed_score(
    parts: jax.Array,
    values: jax.Array,
    bitmap: jax.Array,
    count: jax.Array,
    last: jax.Array,
    *,
    span: int,
    unit: int = 1,
    owner: jax.Array | None = None,
    reduce: str | None = "max",
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Multiply queries with packed vectors, each in the basis of its own segment.

    Differentiable: through ``xla``.

    Args:
        parts: [B, H, M, G, N, D], made by `project_query`, in the dtype of the values.
        values: [B, H, P, r]; a vector with fewer than r bits has zeros behind its values.
        bitmap: int32 [B, H, P, D/32] (uint8 [B, H, P, D/8] if D is no multiple of 32), at most r bits per vector.
        count: int32 [B], ``unit`` times the number of vectors; entries behind them may hold anything.
        last: int32 [B], the highest segment. Without ``owner``, vector p has segment ``min(p // span, last)``.
        span: vectors per segment.
        unit: how much one vector adds to ``count``; a remainder is dropped.
        owner: int32 [B, P], the segment of every vector, ascending; or None.
        reduce: "max" or "mean" over the G query heads, or None for the scores of every head.
        implementation: "pallas_triton" (GPU; D of 32 to 256), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        float32 [B, H, P], or [B, H, G, P] if ``reduce`` is None; -inf behind the last vector.

    Raises:
        ValueError: shapes or dtypes disagree, ``reduce`` or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    if reduce not in ("max", "mean", None):
        raise ValueError(f"packed_score: got reduce={reduce!r}, expected 'max', 'mean' or None")
    rows, vectors = parts.shape[0], values.shape[:3]
    fits = parts.ndim == 6 and values.ndim == 4 and vectors[:2] == parts.shape[:2] and bitmap.shape[:3] == vectors
    if not fits or count.shape != (rows,) or last.shape != (rows,) or values.dtype != parts.dtype:
        raise ValueError(
            f"packed_score: got parts {parts.shape} {parts.dtype}, values {values.shape} {values.dtype}, bitmap "
            f"{bitmap.shape}, count {count.shape}, last {last.shape}, expected [B, H, M, G, N, D], [B, H, P, r] of the same "
            "dtype, [B, H, P, D/32], [B], [B]"
        )
    if owner is not None and owner.shape != (rows, vectors[2]):
        raise ValueError(f"packed_score: got owner {owner.shape}, expected [B, P]={(rows, vectors[2])}")
    return PACKED_SCORE.run(
        parts, values, bitmap, count, last,
        span=span, unit=unit, owner=owner, reduce=reduce, implementation=implementation, platform=platform,
    )  # fmt: skip
