"""The true entries of masks as ascending lists."""

from typing import Annotated

from jax import Array

from pallas_kernels.choose.compact import pallas_mosaic_gpu, pallas_triton, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import INTEGERS, declared, forward

COMPACT = Operation.of("compact", pallas_triton, pallas_mosaic_gpu, reference)


@declared(COMPACT, derivative=INTEGERS)
def compact(
    mask: Annotated[Array, "bool ... S"], capacity: int, *, implementation: str | None = None, platform: str | None = None
) -> tuple[Array, Array]:
    """List the first ``capacity`` true entries of each row of a mask.

    Args:
        capacity: static length K of the result.

    Returns:
        slots int32 [..., K], the listed ones first and ascending, 0 behind them; keep bool [..., K], true where a slot is
        listed.
    """
    return forward()
