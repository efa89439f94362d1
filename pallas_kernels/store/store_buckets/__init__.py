"""Upkeep of SOCKET's index when tokens have been stored: their buckets, and the norms of their values."""

from __future__ import annotations

from jax import Array

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.sign_codes import BLOCK
from pallas_kernels.host import Rows
from pallas_kernels.store.store_buckets import pallas_triton, reference

__all__ = ["STORE_BUCKETS", "store_buckets"]

STORE_BUCKETS = Operation(
    "store_buckets",
    {
        "pallas_triton": Implementation(pallas_triton.store_buckets, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.store_buckets),
    },
)


def store_buckets(
    key: Array,
    value: Array,
    active: Array,
    cursor: Array,
    planes: Array,
    ids: Array,
    norm: Array,
    *,
    rows: Rows | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Put tokens that were just stored into the hash tables; in place where arrays are donated.

    Differentiable: through ``xla``, the norms only.

    Args:
        key: [B, H, S, D], the cache with the tokens in it; with ``rows`` the copies [B, H, R, D].
        value: like ``key``; R may be another number.
        active: int32 [B, T], negative for padding, which stands behind the real tokens.
        cursor: int32 [B], the slot behind the newest token. A token whose slot is S or more is dropped.
        planes: float32 [L, P, D], see `formats.sign_codes`.
        ids: uint8 or uint16 [B, H, N, L * 16], the bucket of each key in each table, in blocks of 16 tokens (see
            `formats.sign_codes.in_blocks`), which have room for S tokens or more.
        norm: [B, H, S], of the values; computed in float32.
        rows: the rows of an offloaded cache, if ``key`` and ``value`` are its copies.
        implementation: "pallas_triton" (GPU; T = 1, D a power of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        The new ids and norm.

    Raises:
        ValueError: shapes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    batch, heads, blocks, width = ids.shape
    slots = norm.shape[2]
    held = key.shape[2] if rows is not None else slots
    sizes = planes.shape[0] * BLOCK, planes.shape[2]
    got = key.shape, value.shape[:2], value.shape[3], active.shape[0], cursor.shape, sizes, norm.shape
    dim = key.shape[3]
    want = (batch, heads, held, dim), (batch, heads), dim, batch, (batch,), (width, dim), (batch, heads, slots)
    if got != want or blocks * BLOCK < slots:
        raise ValueError(
            f"store_buckets: got key {key.shape}, value {value.shape}, active {active.shape}, cursor {cursor.shape}, planes "
            f"{planes.shape}, norm {norm.shape} for ids {ids.shape}, expected [B, H, S, D] twice, [B, T], [B], [L, P, D], "
            "[B, H, S] for [B, H, S / 16 or more, L * 16]"
        )
    arrays = key, value, active, cursor, planes, ids, norm
    return STORE_BUCKETS.run(*arrays, rows=rows, implementation=implementation, platform=platform)
