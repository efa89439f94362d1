"""ParisKV's first stage: keys get votes by the clusters of their slices, and the keys with most votes become candidates."""

from typing import Annotated

from jax import Array

from pallas_kernels.choose.pariskv.collision import pallas_triton, reference
from pallas_kernels.choose.pariskv.collision.part import Part
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import declared, forward

__all__ = ["COLLISION", "Part", "collision"]

COLLISION = Operation.of("collision", pallas_triton, reference)


@declared(COLLISION, derivative="through ``xla``, the mean query only")
def collision(
    query: Annotated[Array, "B H G D"],
    signs: Annotated[Array | None, "float32 D"],
    counts: Annotated[Array, "int32 B H D/8 256"],
    ids: Annotated[Array, "uint8 B H S D/8"],
    position: Annotated[Array, "int32 B H S"],
    stop: Annotated[Array, "int32 B"],
    shares: Annotated[Array, "int32 P Z"],
    *,
    first: int,
    capacity: int,
    part: Part | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array, Array]:
    """List the candidates for the mean query of each group, among the keys of the zone, slots ``first`` to ``stop - 1``.

    In every slice, the score of a cluster is the product of its sign vector with the slice of the query. Clusters are ordered
    by score, and of equal scores the lower cluster is first. Each of several tiers covers a share of the zone's keys from the
    best cluster on. A key gets a vote for every slice and every tier in which its cluster begins. The candidates are the keys
    with most votes, and of equal votes the lower slots; their number is a share of the zone too. Shares depend on how many
    keys the zone holds.

    Args:
        signs: of the random rotation (`pallas_kernels.store.pariskv.encode`), or None: the query is not rotated.
        counts: keys of the zone in each cluster; all slices have the same sum.
        ids: cluster of each slice of each key.
        stop: the slot behind the zone.
        shares: a row per range of zone lengths: the length before which the range ends (the last row has no end), then the
            share of the candidates and the shares of the tiers, in millionths.
        first: first slot of the zone.
        capacity: room for candidates C; no more are taken.
        part: which part of the slots of each row is here (`Part`). ``counts`` cover all parts, ``first`` and ``stop`` are
            slots of the whole row, and ``capacity`` candidates are chosen among all parts. None: they are all.

    Returns:
        The rotated mean query float32 [B, H, D], the slots of the candidates int32 [B, H, C] ascending, and their number
        int32 [B, H]; entries behind that number may hold anything. With ``part``, only candidates of this part are listed,
        by their slots in it, and C is at most S.
    """
    return forward()
