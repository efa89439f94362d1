"""ParisKV's second stage: the best candidates by a 4-bit estimate of q.k, and the list that a decode step attends to."""

from __future__ import annotations

import dataclasses

from jax import Array

from pallas_kernels.choose.rerank import pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["ESTIMATES", "RERANK", "Regions", "estimates", "rerank"]

RERANK = Operation(
    "rerank",
    {
        "pallas_triton": Implementation(pallas_triton.rerank, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.rerank),
    },
)


ESTIMATES = Operation(
    "estimates",
    {
        "pallas_triton": Implementation(pallas_triton.estimates, ("gpu",), pallas_triton.check_estimates),
        "xla": Implementation(reference.estimates),
    },
)


@dataclasses.dataclass(frozen=True)
class Regions:
    """How many entries each region of a list has.

    Attributes:
        sinks: first slots of the cache, which are always listed.
        best: candidates.
        tail: slots from the end of the zone on.
        size: of the whole list, at least the sum of the regions; a row that attends to everything lists its first ``size``
            slots.
    """

    sinks: int
    best: int
    tail: int
    size: int

    def __post_init__(self):
        if self.size < self.sinks + self.best + self.tail:
            raise ValueError(f"rerank: got {self}, expected a size of at least {self.sinks + self.best + self.tail}")


def estimates(
    query: Array,
    slots: Array,
    count: Array,
    rows: Array,
    *,
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Estimate the products by which `rerank` chooses, for a choice among the candidates of several devices.

    Args:
        query: as in `rerank`.
        slots: as in `rerank`.
        count: as in `rerank`.
        rows: as in `rerank`.
        scale: as in `rerank`.
        implementation: "pallas_triton" (GPU), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        float32 [B, H, C]: -inf behind the candidates, and above -inf for each of them whose estimate is a number.

    Raises:
        ValueError: shapes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    batch, heads, room = slots.shape
    dim, shapes = query.shape[-1], [x.shape for x in (query, count, rows)]
    if shapes != [(batch, heads, dim), (batch, heads), (batch, heads, rows.shape[2], dim)]:
        raise ValueError(
            f"estimates: got query, count, rows {shapes} for slots {slots.shape}, "
            "expected [B, H, D], [B, H], [B, H, S, D] and [B, H, C]"
        )
    return ESTIMATES.run(
        query, slots, count, rows, scale=scale, implementation=implementation, platform=platform
    )


def rerank(
    query: Array,
    slots: Array,
    count: Array,
    rows: Array,
    position: Array,
    cursor: Array,
    stop: Array,
    budget: Array | int,
    enough: Array | int,
    *,
    regions: Regions,
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """List the slots that a decode step attends to: sinks, the ``budget`` candidates of the highest estimate, the tail.

    Of equal estimates the lower entry is taken. Rows with ``cursor`` below ``enough``, and rows whose zone is empty, list
    their first slots instead. Empty slots and slots from ``cursor`` on are listed, but masked.

    Not differentiable: its results are integers and truth values.

    Args:
        query: float32 [B, H, D], rotated as the keys were.
        slots: int32 [B, H, C], the candidates, slots of the zone that hold a token.
        count: int32 [B, H], number of candidates; entries of ``slots`` behind them may hold anything.
        rows: uint8 [B, H, S, D], codes of all keys, see `pallas_kernels.store.encode.encode`.
        position: int32 [B, H, S], negative for an empty slot.
        cursor: int32 [B], the first slot that was never written.
        stop: int32 [B], the slot behind the zone.
        budget: candidates to list, a number or int32 scalar; at most ``regions.best``.
        enough: a row with fewer stored slots attends to all of them, a number or int32 scalar.
        regions: the regions of the list.
        scale: see `pallas_kernels.store.encode.encode`.
        implementation: "pallas_triton" (GPU), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        slots int32 [B, H, K] and mask bool [B, H, K] with K = min(``regions.size``, S); no slot stands twice where the mask
        is true.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    batch, heads, stored = position.shape
    dim = query.shape[-1]
    got = [x.shape for x in (query, slots, count, rows, cursor, stop)]
    room = slots.shape[-1]
    codes = (batch, heads, stored, dim)
    if got != [(batch, heads, dim), (batch, heads, room), (batch, heads), codes, (batch,), (batch,)]:
        raise ValueError(
            f"rerank: got query, slots, count, rows, cursor, stop {got} for position {position.shape}, "
            "expected [B, H, D], [B, H, C], [B, H], [B, H, S, D], [B], [B] and [B, H, S]"
        )
    dtypes = [str(x.dtype) for x in (query, slots, count, rows, position, cursor, stop)]
    if dtypes != ["float32", "int32", "int32", "uint8", "int32", "int32", "int32"]:
        raise ValueError(f"rerank: got {dtypes}, expected query float32, rows uint8, all others int32")
    return RERANK.run(
        query,
        slots,
        count,
        rows,
        position,
        cursor,
        stop,
        budget,
        enough,
        regions=regions,
        scale=scale,
        implementation=implementation,
        platform=platform,
    )
