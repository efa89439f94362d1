"""The tokens that a step attends to where tokens are searched by product-quantised keys (PQCache)."""

from __future__ import annotations

import jax

from pallas_kernels.choose.code_select import pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats import bit_codes

__all__ = ["CODE_SELECT", "code_select"]

CODE_SELECT = Operation(
    "code_select",
    {
        "pallas_triton": Implementation(pallas_triton.code_select, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.code_select),
    },
)


def code_select(
    query: jax.Array,
    centroids: jax.Array,
    ids: jax.Array,
    stop: jax.Array,
    length: jax.Array,
    wanted: jax.Array,
    *,
    first: int,
    capacity: int,
    room: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """List the first slots, the best of the searched slots, and the slots behind these, for each KV head.

    Slots ``first`` to ``stop - 1`` are searched. The score of one is the attention that the group pays to it::

        s[i] = sum over g of  softmax_i( q[g] . c(i) / sqrt(D) )

    where c(i) is the key that the centroids of slot i make. Of equal scores the lower slot is better.

    Not differentiable: its results are integers and truth values.

    Args:
        query: [B, H, G, D].
        centroids: float32 [B, H, M, C, D/M], of each part of the channels.
        ids: uint8 [B, H, N, bytes], the numbers of each slot's centroids as one number, the first in its lowest bits
            (`pallas_kernels.formats.bit_codes`).
        stop: int32 [B], the slot behind the searched ones, not below ``first``; at most ``length``, unless it is ``first``.
        length: int32 [B], slots that hold a token, which are the first ones.
        wanted: int32 [B], searched slots to list; of fewer all, and no more than ``capacity``.
        first: slots before the searched ones, all listed.
        capacity: room in the list for searched slots K, at least 1.
        room: room in the list for slots behind them R: ``stop`` to ``stop + R - 1``.
        implementation: "pallas_triton" (GPU), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        slots int32 [B, H, first + K + R], where the best slots come ascending; and bool of this shape, false for entries to
        ignore, whose slot is 0.

    Raises:
        ValueError: shapes or dtypes disagree, a size is out of range, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    batch, heads, _, dim = query.shape
    parts, count, width = centroids.shape[2:]
    _, size = bit_codes.together(code_bits(parts, count))
    shapes = [
        centroids.shape[:2],
        ids.shape[:2],
        (parts * width, ids.shape[3]),
        *(x.shape for x in (stop, length, wanted)),
    ]
    if shapes != [(batch, heads)] * 2 + [(dim, size)] + [(batch,)] * 3:
        raise ValueError(
            f"code_select: got query {query.shape}, centroids {centroids.shape}, ids {ids.shape}, stop, length, wanted "
            f"{shapes[3:]}, expected [B, H, G, D], [B, H, M, C, D/M], [B, H, N, {size}], [B] three times"
        )
    dtypes = [str(x.dtype) for x in (centroids, ids, stop, length, wanted)]
    if dtypes != ["float32", "uint8", "int32", "int32", "int32"]:
        raise ValueError(
            f"code_select: got centroids, ids, stop, length, wanted of {dtypes}, expected float32, uint8 and int32s"
        )
    if first < 0 or capacity < 1 or room < 0:
        raise ValueError(f"code_select: got {first=}, {capacity=} and {room=}, expected at least 0, 1 and 0")
    sizes = {"first": first, "capacity": capacity, "room": room}
    args = query, centroids, ids, stop, length, wanted
    return CODE_SELECT.run(*args, **sizes, implementation=implementation, platform=platform)


def code_bits(parts: int, count: int) -> int:
    """Count the bits of a slot's code: the numbers of ``parts`` of ``count`` centroids each."""
    return parts * bit_codes.bits_of(count)
