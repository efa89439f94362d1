"""Upkeep of ParisKV's index when tokens have been stored: their codes, and the counts of keys per cluster."""

from __future__ import annotations

from jax import Array

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.key_codes import CLUSTERS
from pallas_kernels.host import Rows
from pallas_kernels.store.store_codes import pallas_triton, reference

__all__ = ["STORE_CODES", "store_codes"]

STORE_CODES = Operation(
    "store_codes",
    {
        "pallas_triton": Implementation(pallas_triton.store_codes, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.store_codes),
    },
)


def store_codes(
    key: Array,
    position: Array,
    active: Array,
    cursor: Array,
    signs: Array | None,
    ids: Array,
    code_rows: Array,
    counts: Array,
    waiting: Array,
    stop: Array,
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

    Not differentiable: its results are integers and truth values.

    Args:
        key: [B, H, S, D], the cache with the tokens in it; with ``rows``, for T = 1 only, the copies [B, H, R, D].
        position: int32 [B, H, S], negative for an empty slot.
        active: int32 [B, T], negative for padding, which stands behind the real tokens.
        cursor: int32 [B], the slot behind the newest token.
        signs: see `encode`.
        ids: uint8 [B, H, S, N], clusters of all keys, see `encode`.
        code_rows: uint8 [B, H, S, D], codes of all keys, see `encode`.
        counts: int32 [B, H, N, 256], how many keys of the zone each cluster has.
        waiting: int32 [B, H, N, 256], how many waiting keys each cluster has.
        stop: int32 [B], the slot behind the zone.
        num_local: number of newest tokens that are not counted, at least 1.
        buffer: number of tokens that are added to the zone together.
        scale: see `encode`.
        rows: the rows of an offloaded cache, if ``key`` is its copies; None if ``key`` has all slots.
        implementation: "pallas_triton" (GPU, T = 1), "xla", or None for the first that runs; codes are made by `encode`.
        platform: see ``Operation.run``.

    Returns:
        The new ids, code_rows, counts, waiting and stop.

    Raises:
        ValueError: shapes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    batch, heads, held, dim = key.shape
    slots = held if rows is None else position.shape[2]
    got = [x.shape for x in (position, ids, code_rows, counts, waiting, cursor, stop)]
    lists, slices = (batch, heads, slots), dim // 8
    codes = [(*lists, slices), (*lists, dim)]
    if got != [lists, *codes, *[(batch, heads, slices, CLUSTERS)] * 2, (batch,), (batch,)]:
        raise ValueError(
            f"store_codes: got position, ids, code_rows, counts, waiting, cursor, stop {got} for key {key.shape}, expected "
            "[B, H, S], [B, H, S, D/8], [B, H, S, D], [B, H, D/8, 256] twice, [B] twice"
        )
    return STORE_CODES.run(
        key,
        position,
        active,
        cursor,
        signs,
        ids,
        code_rows,
        counts,
        waiting,
        stop,
        num_local=num_local,
        buffer=buffer,
        scale=scale,
        rows=rows,
        implementation=implementation,
        platform=platform,
    )
