"""MagicPIG's selection: the tokens that share the most buckets with a query head, as one list of each KV head."""

from __future__ import annotations

from jax import Array

from pallas_kernels.choose.match_select import pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.score.bucket_matches import check_buckets

__all__ = ["MATCH_SELECT", "match_select"]

MATCH_SELECT = Operation(
    "match_select",
    {
        "pallas_triton": Implementation(pallas_triton.match_select, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.match_select),
    },
)


def match_select(
    query: Array,
    ids: Array,
    near: Array,
    length: Array,
    *,
    first: int,
    capacity: int,
    room: int,
    num_bits: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array, Array, Array]:
    """List the first slots, the sampled ones of the searched slots, and the slots behind these, for each KV head.

    Slots ``first`` to ``near - 1`` are searched. A query head samples a slot if both have the same bucket in two tables or
    more. If any head of the group has sampled a slot, it is listed; if there is no room for all, those that have the most
    equal buckets with one query head, and of equal numbers the lower slots.

    Not differentiable: its results are integers and truth values.

    Args:
        query: uint8 or uint16 [B, H, G, L], the bucket of each query head in each table, below 2**num_bits.
        ids: of the same dtype [B, H, L, N], the bucket of each token. The kernel is fast where N is a multiple of 8.
        near: int32 [B], the slot behind the searched ones, not below ``first``; at most ``length``, unless it is ``first``.
        length: int32 [B], slots that hold a token, which are the first ones.
        first: slots before the searched ones, all listed.
        capacity: room in the list for sampled slots K, at least 1.
        room: room in the list for slots behind the searched ones R: ``near`` to ``near + R - 1``.
        num_bits: bits of a bucket.
        implementation: "pallas_triton" (GPU; uint16 with up to 14 bits, up to 8 query heads), "xla", or None for the first
            that runs.
        platform: see ``Operation.run``.

    Returns:
        slots int32 [B, H, E], E = first + K + R, where the sampled ones come ascending; bool of this shape, false for entries
        to ignore, whose slot is 0; bool [B, H, G, E], which query heads sampled the slot, and all of them at both ends;
        int32 [B, H], how many slots were sampled, listed or not.

    Raises:
        ValueError: shapes or dtypes disagree, ``capacity`` is below 1, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    check_buckets("match_select", query, ids, near)
    if (length.shape, str(length.dtype)) != (near.shape, "int32"):
        raise ValueError(f"match_select: got length {length.dtype} {length.shape}, expected int32 {near.shape}")
    if min(first, capacity - 1, room) < 0:
        raise ValueError(f"match_select: got {first=}, {capacity=} and {room=}, expected at least 0, 1 and 0")
    return MATCH_SELECT.run(
        query, ids, near, length, first=first, capacity=capacity, room=room, num_bits=num_bits,
        implementation=implementation, platform=platform,
    )  # fmt: skip
