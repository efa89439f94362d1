"""ParisKV's first stage: keys get votes by the clusters of their slices, and the keys with most votes become candidates."""

from __future__ import annotations

from jax import Array

from pallas_kernels.choose.collision import pallas_triton, reference
from pallas_kernels.choose.collision.part import Part
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.key_codes import CLUSTERS

__all__ = ["COLLISION", "Part", "collision"]

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
    part: Part | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array, Array]:
    """List the candidates for the mean query of each group, among the keys of the zone, slots ``first`` to ``stop - 1``.

    In every slice, the score of a cluster is the product of its sign vector with the slice of the query. Clusters are ordered
    by score, and of equal scores the lower cluster is first. Each of Z tiers covers a share of the zone's keys from the best
    cluster on. A key gets a vote for every slice and every tier in which its cluster begins. The candidates are the keys
    with most votes, and of equal votes the lower slots; their number is a share of the zone too. Shares depend on how many
    keys the zone holds.

    Differentiable: through ``xla``, the mean query only.

    Args:
        query: [B, H, G, D].
        signs: float32 [D] of the random rotation (`pallas_kernels.store.encode`), or None: the query is not rotated.
        counts: int32 [B, H, N, 256], keys of the zone in each cluster, N = D / 8; all slices have the same sum.
        ids: uint8 [B, H, S, N], cluster of each slice of each key.
        position: int32 [B, H, S], negative for an empty slot.
        stop: int32 [B], the slot behind the zone.
        shares: int32 [P, 2 + Z], a row per range of zone lengths: the length before which the range ends (the last row has no
            end), then the share of the candidates and the shares of the tiers, in millionths.
        first: first slot of the zone.
        capacity: room for candidates C; no more are taken.
        part: which part of the slots of each row is here (`Part`). ``counts`` cover all parts, ``first`` and ``stop`` are
            slots of the whole row, and ``capacity`` candidates are chosen among all parts. None:
            they are all.
        implementation: "pallas_triton" (GPU), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        The rotated mean query float32 [B, H, D], the slots of the candidates int32 [B, H, C] ascending, and their number
        int32 [B, H]; entries behind that number may hold anything. With ``part``, only candidates
        of this part are listed, by their slots in it, and C is at most S.

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
        part=part,
        implementation=implementation,
        platform=platform,
    )
