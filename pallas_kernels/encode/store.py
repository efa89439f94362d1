"""Index upkeep when tokens have been stored: the operation and its plain version."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.encode import pallas_store
from pallas_kernels.encode.codes import encode
from pallas_kernels.encode.reference import CLUSTERS
from pallas_kernels.host import Rows, copy_row


def histogram(ids: Array, live: Array) -> Array:
    """Keys in each cluster: ids uint8 [B, H, S, N], those ``live`` bool [B, H, S] counted, to int32 [B, H, N, 256]."""
    batch, heads, keys, slices = ids.shape
    b, h, n = (
        jnp.arange(size).reshape([-1 if axis == at else 1 for axis in range(4)])
        for at, size in ((0, batch), (1, heads), (3, slices))
    )
    empty = jnp.zeros((batch, heads, slices, CLUSTERS), jnp.int32)
    return empty.at[b, h, n, ids.astype(jnp.int32)].add(live.astype(jnp.int32)[..., None])


def _store_codes(
    key, position, active, cursor, signs, ids, code_rows, counts, waiting, stop, *, num_local, buffer, scale,
    rows=None,
):  # fmt: skip
    """See `store_codes`."""
    tokens, slots = active.shape[1], position.shape[2]
    order = jnp.arange(tokens, dtype=jnp.int32)[None]
    arrived = jnp.sum(active >= 0, axis=1, dtype=jnp.int32)
    slot = jnp.where(active >= 0, (cursor - arrived)[:, None] + order, slots)
    at = jnp.minimum(slot, slots - 1)[:, None, :, None]
    at = at if rows is None else copy_row(at, rows.sinks, key.shape[2])
    made = encode(jnp.take_along_axis(key, at, axis=2), (active >= 0)[:, None], signs, scale=scale)
    ids, code_rows = (_put(store, new, slot) for store, new in zip((ids, code_rows), made, strict=True))
    # Of the tail beyond the local window, what has not been counted yet: at most as many as have arrived.
    beyond = cursor - stop - num_local
    flushed = jnp.maximum(beyond, 0) // buffer * buffer
    turn = (stop + jnp.maximum(beyond - arrived, 0))[:, None] + order
    at = jnp.clip(turn, 0, slots - 1)[:, None]
    due = (turn < (stop + beyond)[:, None])[:, None] & (jnp.take_along_axis(position, at, axis=2) >= 0)
    now = turn[:, None] < (stop + flushed)[:, None, None]
    ripe = jnp.take_along_axis(ids, at[..., None], axis=2)
    flush = (flushed > 0)[:, None, None, None]
    counts = counts + jnp.where(flush, waiting, 0) + histogram(ripe, due & now)
    waiting = jnp.where(flush, 0, waiting) + histogram(ripe, due & ~now)
    return ids, code_rows, counts, waiting, stop + flushed


def _put(store: Array, new: Array, slot: Array) -> Array:
    """``store`` [B, H, S, X] with ``new`` [B, H, T, X] at ``slot`` int32 [B, T]; the slot S does not exist and is dropped."""
    if slot.shape == (1, 1):  # a write in place, as `LayerCache.append` has it
        start = jnp.minimum(slot[0, 0], store.shape[2] - 1)
        old = lax.dynamic_slice_in_dim(store, start, 1, 2)
        return lax.dynamic_update_slice_in_dim(store, jnp.where(slot[0, 0] < store.shape[2], new, old), start, 2)
    row = jnp.arange(slot.shape[0])[:, None]
    return store.at[row, :, slot].set(new.swapaxes(1, 2), mode="drop")


STORE_CODES = Operation(
    "store_codes",
    {
        "pallas_triton": Implementation(pallas_store.store_codes, ("gpu",), pallas_store.check),
        "xla": Implementation(_store_codes),
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
    """Encode the tokens just stored, and count those that left the local window, in place where that is allowed.

    A token is counted when its turn comes, in ``waiting``; whenever ``buffer`` tokens wait, all of them join ``counts`` and
    the zone's end moves behind them.

    Args:
        key: [B, H, S, D], the cache with the tokens in it; with ``rows``, for T = 1 only, the copies [B, H, R, D].
        position: int32 [B, H, S], negative where a slot holds nothing.
        active: int32 [B, T], negative for tokens that are padding, behind the real ones.
        cursor: int32 [B], the slot behind the newest token.
        signs: see `encode`.
        ids: uint8 [B, H, S, N], codes of all keys, as are ``code_rows``.
        code_rows: uint8 [B, H, S, D].
        counts: int32 [B, H, N, 256], keys of the zone in each cluster.
        waiting: int32 [B, H, N, 256], the same of the tokens that join next.
        stop: int32 [B], the slot behind the zone.
        num_local: newest tokens that are not counted, at least 1.
        buffer: tokens that join together.
        scale: see `encode`.
        rows: of an offloaded cache, whose copies ``key`` then has; None where ``key`` has all slots.
        implementation: "pallas_triton" (GPU, T = 1), "xla", or None for the first that runs; codes are those of `encode`.
        platform: see ``Operation.run``.

    Returns:
        ids, code_rows, counts, waiting and stop as they are now.

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
