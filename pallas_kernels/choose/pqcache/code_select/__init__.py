"""The tokens that a step attends to where tokens are searched by product-quantised keys (PQCache)."""

from typing import Annotated

from jax import Array

from pallas_kernels.choose.pqcache.code_select import pallas_triton, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.formats import bit_codes
from pallas_kernels.signature import INTEGERS, declared, forward

CODE_SELECT = Operation.of("code_select", pallas_triton, reference)


@declared(CODE_SELECT, derivative=INTEGERS)
def code_select(
    query: Annotated[Array, "B H G D"],
    centroids: Annotated[Array, "float32 B H M C D/M"],
    ids: Annotated[Array, "uint8 B H N _"],
    stop: Annotated[Array, "int32 B"],
    length: Annotated[Array, "int32 B"],
    wanted: Annotated[Array, "int32 B"],
    *,
    first: Annotated[int, ">=0"],
    capacity: Annotated[int, ">=1"],
    room: Annotated[int, ">=0"],
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """List the first slots, the best of the searched slots, and the slots behind these, for each KV head.

    Slots ``first`` to ``stop - 1`` are searched. The score of one is the attention that the group pays to it::

        s[i] = sum over g of  softmax_i( q[g] . c(i) / sqrt(D) )

    where c(i) is the key that the centroids of slot i make. Of equal scores the lower slot is better.

    Args:
        centroids: of each part of the channels.
        ids: the numbers of each slot's centroids as one number, the first in its lowest bits
            (`pallas_kernels.formats.bit_codes`).
        stop: the slot behind the searched ones, not below ``first``; at most ``length``, unless it is ``first``.
        length: slots that hold a token, which are the first ones.
        wanted: searched slots to list; of fewer all, and no more than ``capacity``.
        first: slots before the searched ones, all listed.
        capacity: room in the list for searched slots K.
        room: room in the list for slots behind them R: ``stop`` to ``stop + R - 1``.

    Returns:
        slots int32 [B, H, first + K + R], where the best slots come ascending; and bool of this shape, false for entries to
        ignore, whose slot is 0.
    """
    size = bit_codes.together(code_bits(*centroids.shape[2:4]))[1]
    if ids.shape[3] != size:
        raise ValueError(f"code_select: got ids {ids.shape}, expected {size} bytes for centroids {centroids.shape}")
    return forward()


def code_bits(parts: int, count: int) -> int:
    """Count the bits of a slot's code: the numbers of ``parts`` of ``count`` centroids each."""
    return parts * bit_codes.bits_of(count)
