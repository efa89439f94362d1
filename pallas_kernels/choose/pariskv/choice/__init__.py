"""ParisKV's choice of the slots that a decode step attends to: `collision`, then `rerank`."""

from typing import Annotated

from jax import Array

from pallas_kernels.choose.pariskv.choice import pallas_mosaic_gpu, pallas_triton, reference
from pallas_kernels.choose.pariskv.rerank import Regions
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import INTEGERS, declared, forward

__all__ = ["CHOICE", "choice"]

CHOICE = Operation.of("choice", pallas_triton, pallas_mosaic_gpu, reference)


@declared(CHOICE, derivative=INTEGERS)
def choice(
    query: Annotated[Array, "B H G D"],
    signs: Annotated[Array | None, "float32 D"],
    counts: Annotated[Array, "int32 B H D/8 256"],
    ids: Annotated[Array, "uint8 B H S D/8"],
    rows: Annotated[Array, "uint8 B H S D"],
    position: Annotated[Array, "int32 B H S"],
    cursor: Annotated[Array, "int32 B"],
    stop: Annotated[Array, "int32 B"],
    shares: Annotated[Array, "int32 P Z"],
    budget: Annotated[Array | int, "int32 []"],
    enough: Annotated[Array | int, "int32 []"],
    *,
    first: int,
    capacity: int,
    regions: Regions,
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """List the slots that a decode step attends to: sinks, the best candidates of `collision` by `rerank`, the tail.

    Args:
        query: as in `collision`, like all arguments that it has.
        rows: as in `rerank`, like all others and the results.
        scale: see `pallas_kernels.store.pariskv.encode.encode`.
    """
    return forward()
