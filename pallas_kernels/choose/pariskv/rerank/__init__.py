"""ParisKV's second stage: the best candidates by a 4-bit estimate of q.k, and the list that a decode step attends to."""

import dataclasses
from typing import Annotated

from jax import Array

from pallas_kernels.choose.pariskv.rerank import pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.signature import INTEGERS, declared, forward

__all__ = ["ESTIMATES", "RERANK", "Regions", "estimates", "rerank"]

RERANK = Operation.of("rerank", pallas_triton, reference)
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


@declared(ESTIMATES)
def estimates(
    query: Annotated[Array, "float32 B H D"],
    slots: Annotated[Array, "int32 B H C"],
    count: Annotated[Array, "int32 B H"],
    rows: Annotated[Array, "uint8 B H S D"],
    *,
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Estimate the products by which `rerank` chooses, for a choice among the candidates of several devices.

    Args:
        query: as in `rerank`, like all other arguments.

    Returns:
        float32 [B, H, C]: -inf behind the candidates, and above -inf for each of them whose estimate is a number.
    """
    return forward()


@declared(RERANK, derivative=INTEGERS)
def rerank(
    query: Annotated[Array, "float32 B H D"],
    slots: Annotated[Array, "int32 B H C"],
    count: Annotated[Array, "int32 B H"],
    rows: Annotated[Array, "uint8 B H S D"],
    position: Annotated[Array, "int32 B H S"],
    cursor: Annotated[Array, "int32 B"],
    stop: Annotated[Array, "int32 B"],
    budget: Annotated[Array | int, "int32 []"],
    enough: Annotated[Array | int, "int32 []"],
    *,
    regions: Regions,
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """List the slots that a decode step attends to: sinks, the ``budget`` candidates of the highest estimate, the tail.

    Of equal estimates the lower entry is taken. Rows with ``cursor`` below ``enough``, and rows whose zone is empty, list
    their first slots instead. Empty slots and slots from ``cursor`` on are listed, but masked.

    Args:
        query: rotated as the keys were.
        slots: the candidates, slots of the zone that hold a token.
        count: number of candidates; entries of ``slots`` behind them may hold anything.
        rows: codes of all keys, see `pallas_kernels.store.pariskv.encode.encode`.
        cursor: the first slot that was never written.
        stop: the slot behind the zone.
        budget: candidates to list; at most ``regions.best``.
        enough: a row with fewer stored slots attends to all of them.
        regions: the regions of the list.
        scale: see `pallas_kernels.store.pariskv.encode.encode`.

    Returns:
        slots int32 [B, H, K] and mask bool [B, H, K] with K = min(``regions.size``, S); no slot stands twice where the mask
        is true.
    """
    return forward()
