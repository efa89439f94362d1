"""Upkeep of PQCache's index when tokens have been stored: the numbers of the centroids that are nearest to their keys."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats import bit_codes
from pallas_kernels.host import Rows
from pallas_kernels.store.store_ids import pallas_triton, reference
from pallas_kernels.store.store_ids.reference import code_of, nearest

__all__ = ["STORE_IDS", "code_of", "nearest", "store_ids"]

STORE_IDS = Operation(
    "store_ids",
    {
        "pallas_triton": Implementation(pallas_triton.store_ids, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.store_ids),
    },
)


def store_ids(
    key: jax.Array,
    active: jax.Array,
    cursor: jax.Array,
    centroids: jax.Array,
    ids: jax.Array,
    *,
    rows: Rows | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Add the codes of tokens that were just stored; in place where the array is donated.

    Not differentiable: its results are integers and truth values.

    Args:
        key: [B, H, S, D], the cache with the tokens in it; with ``rows`` the copies [B, H, R, D], all tokens' among them.
        active: int32 [B, T], negative for padding, which stands behind the real tokens.
        cursor: int32 [B], the slot behind the newest token.
        centroids: float32 [B, H, M, C, D/M], of each part of the channels; of equally near ones the first is taken.
        ids: uint8 [B, H, N, bytes], codes of slots (`pallas_kernels.formats.bit_codes`), 0 in the slots of the tokens.
        rows: the rows of an offloaded cache, if ``key`` is its copies; None if ``key`` has all slots.
        implementation: "pallas_triton" (GPU, T = 1), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        The new ids.

    Raises:
        ValueError: shapes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    parts, count, width = centroids.shape[2:]
    size = bit_codes.together(parts * bit_codes.bits_of(count))[1]
    batch, heads, _, dim = key.shape
    got = [centroids.shape[:2], ids.shape[:2], (parts * width, ids.shape[3]), active.shape[:1], cursor.shape]
    if got != [(batch, heads)] * 2 + [(dim, size)] + [(batch,)] * 2:
        raise ValueError(
            f"store_ids: got key {key.shape}, active {active.shape}, cursor {cursor.shape}, centroids {centroids.shape}, ids "
            f"{ids.shape}, expected [B, H, S, D], [B, T], [B], [B, H, M, C, D/M], [B, H, N, {size}]"
        )
    return STORE_IDS.run(
        key, active, cursor, centroids, ids, rows=rows, implementation=implementation, platform=platform
    )
