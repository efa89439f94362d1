"""Upkeep of ParisKV's index when tokens have been stored: their codes, and the counts of keys per cluster."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.host import Rows
from pallas_kernels.signature import INTEGERS, declared, forward
from pallas_kernels.store.pariskv.store_codes import pallas_mosaic_gpu, pallas_triton, reference

STORE_CODES = Operation.of("store_codes", pallas_triton, pallas_mosaic_gpu, reference, in_place=True)


@declared(STORE_CODES, derivative=INTEGERS)
def store_codes(
    key: Annotated[Array, "B H S D; B H R D with rows"],
    position: Annotated[Array, "int32 B H S"],
    active: Annotated[Array, "int32 B T"],
    cursor: Annotated[Array, "int32 B"],
    signs: Annotated[Array | None, "float32 D"],
    ids: Annotated[Array, "uint8 B H S D/8"],
    code_rows: Annotated[Array, "uint8 B H S D"],
    counts: Annotated[Array, "int32 B H D/8 256"],
    waiting: Annotated[Array, "int32 B H D/8 256"],
    stop: Annotated[Array, "int32 B"],
    *,
    num_local: int,
    buffer: int,
    scale: float,
    rows: Rows | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    """Encode tokens that were just stored, and count tokens that left the local window; in place where arrays are donated.

    A token that leaves the local window is counted in ``waiting``. When ``buffer`` tokens wait, all of them are added to
    ``counts``, and the end of the zone moves behind them.

    Args:
        key: the cache with the tokens in it; with ``rows``, for T = 1 only, the copies.
        active: negative for padding, which stands behind the real tokens.
        signs: see `encode`.
        ids: clusters of all keys, see `encode`.
        code_rows: codes of all keys, see `encode`.
        counts: how many keys of the zone each cluster has.
        waiting: how many waiting keys each cluster has.
        stop: the slot behind the zone.
        num_local: number of newest tokens that are not counted, at least 1.
        buffer: number of tokens that are added to the zone together.
        scale: see `encode`.
        implementation: "pallas_triton" takes T = 1; codes are made by `encode`.

    Returns:
        The new ids, code_rows, counts, waiting and stop.
    """
    return forward()
