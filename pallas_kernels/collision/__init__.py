"""ParisKV's first stage: keys vote by the clusters of their slices; those with most votes become candidates."""

from __future__ import annotations

from jax import Array

from pallas_kernels.collision import pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.key_codes import CLUSTERS

__all__ = ["COLLISION", "collision"]

COLLISION = Operation(
    "collision",
    {
        "pallas_triton": Implementation(pallas_triton.collision, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.collision),
    },
)


def collision(
    query: Array,
    signs: Array | None,
    counts: Array,
    ids: Array,
    position: Array,
    stop: Array,
    shares: Array,
    *,
    first: int,
    capacity: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array, Array]:
    """Candidates of the mean query of each group, from the keys of the zone, slots ``first`` to ``stop``.

    A key gets one vote per slice for each of the Z tiers that its cluster begins in: clusters come in the order of their
    score, the product of their sign vector with the query's slice (the lower cluster among equals), and a tier covers a
    share of the zone's keys. The candidates are the keys with most votes, the lower slot among equals; their number is a
    share of the zone too. Shares depend on how many keys the zone holds.

    Args:
        query: [B, H, G, D].
        signs: float32 [D] of the random rotation (`pallas_kernels.encode`), or None: the query is not rotated.
        counts: int32 [B, H, N, 256], keys of the zone in each cluster, N = D / 8; the same sum in every slice.
        ids: uint8 [B, H, S, N], cluster of each slice of each key.
        position: int32 [B, H, S], negative where a slot holds nothing.
        stop: int32 [B], the slot behind the zone.
        shares: int32 [P, 2 + Z], a row per range of zone lengths: the length the range ends before (the last row has no
            end), then in millionths the candidates' share and the tiers'.
        first: first slot of the zone.
        capacity: room for candidates C; no more are taken.
        implementation: "pallas_triton" (GPU), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        The rotated mean query float32 [B, H, D], the candidates' slots int32 [B, H, C] ascending, and their number int32
        [B, H]; entries behind it may hold anything.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    batch, heads, slots, slices = ids.shape
    shapes = [x.shape for x in (counts, position, stop)]
    expected = [(batch, heads, slices, CLUSTERS), (batch, heads, slots), (batch,)]
    if shapes != expected or query.shape[:2] != (batch, heads) or query.shape[3] != slices * 8 or shares.ndim != 2:
        raise ValueError(
            f"collision: got query {query.shape}, ids {ids.shape}, counts, position, stop {shapes}, shares {shares.shape}, "
            "expected [B, H, G, D], [B, H, S, D/8], [B, H, D/8, 256], [B, H, S], [B], [P, 2 + Z]"
        )
    dtypes = [str(x.dtype) for x in (ids, counts, position, stop, shares)]
    if dtypes != ["uint8", "int32", "int32", "int32", "int32"]:
        raise ValueError(f"collision: got ids, counts, position, stop, shares of {dtypes}, expected uint8 and int32s")
    return COLLISION.run(
        query,
        signs,
        counts,
        ids,
        position,
        stop,
        shares,
        first=first,
        capacity=capacity,
        implementation=implementation,
        platform=platform,
    )
