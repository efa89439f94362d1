"""MagicPIG's selection: the tokens that share the most buckets with a query head, as one list of each KV head."""

from typing import Annotated

from jax import Array

from pallas_kernels.choose.magicpig.match_select import pallas_triton, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import INTEGERS, declared, forward

MATCH_SELECT = Operation.of("match_select", pallas_triton, reference)


@declared(MATCH_SELECT, derivative=INTEGERS)
def match_select(
    query: Annotated[Array, "uint8|uint16 B H G L"],
    ids: Annotated[Array, "like query B H L N"],
    near: Annotated[Array, "int32 B"],
    length: Annotated[Array, "int32 B"],
    *,
    first: Annotated[int, ">=0"],
    capacity: Annotated[int, ">=1"],
    room: Annotated[int, ">=0"],
    num_bits: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array, Array, Array]:
    """List the first slots, the sampled ones of the searched slots, and the slots behind these, for each KV head.

    Slots ``first`` to ``near - 1`` are searched. A query head samples a slot if both have the same bucket in two tables or
    more. If any head of the group has sampled a slot, it is listed; if there is no room for all, those that have the most
    equal buckets with one query head, and of equal numbers the lower slots.

    Args:
        query: the bucket of each query head in each table, below 2**num_bits.
        ids: the bucket of each token. The kernel is fast where N is a multiple of 8.
        near: the slot behind the searched ones, not below ``first``; at most ``length``, unless it is ``first``.
        length: slots that hold a token, which are the first ones.
        first: slots before the searched ones, all listed.
        capacity: room in the list for sampled slots K.
        room: room in the list for slots behind the searched ones R: ``near`` to ``near + R - 1``.
        num_bits: bits of a bucket.
        implementation: "pallas_triton" takes uint16 with up to 14 bits, up to 8 query heads.

    Returns:
        slots int32 [B, H, E], E = first + K + R, where the sampled ones come ascending; bool of this shape, false for entries
        to ignore, whose slot is 0; bool [B, H, G, E], which query heads sampled the slot, and all of them at both ends;
        int32 [B, H], how many slots were sampled, listed or not.
    """
    return forward()
