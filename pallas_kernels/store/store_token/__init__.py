"""Stores one token per row in a cache and rotates its key and query: all that a decode step does before attention."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.quantised import GROUPS, Quantised
from pallas_kernels.host import Rows
from pallas_kernels.store.store_token import pallas_triton, reference

__all__ = ["STORE_TOKEN", "Stored", "store_token"]

STORE_TOKEN = Operation(
    "store_token",
    {
        "pallas_triton": Implementation(pallas_triton.store_token, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.store_token),
    },
)


@dataclasses.dataclass(frozen=True)
class Stored:
    """The arrays of a cache with one more token, and the query that goes with it."""

    key: jax.Array | Quantised  # [B, H, S, D], as it was given
    value: jax.Array | Quantised  # [B, H, S, D]
    position: jax.Array  # int32 [B, H, S]
    cursor: jax.Array  # int32 [B]
    query: jax.Array | None  # [B, H, G, D], rotated


def store_token(
    key: jax.Array,
    value: jax.Array,
    place: jax.Array,
    *,
    cache_key: jax.Array | Quantised,
    cache_value: jax.Array | Quantised,
    cache_position: jax.Array,
    cursor: jax.Array,
    query: jax.Array | None = None,
    inv_freq: jax.Array | None = None,
    rows: Rows | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> Stored:
    """Write the token of row b to slot ``cursor[b]`` of every head and move the cursor; in place where arrays are donated.

    A row with a negative ``place`` keeps its cache and its cursor. A full row, whose cursor is S or more, stores nothing, but
    its cursor moves.

    Differentiable: through ``xla``, the keys, values and query only.

    Args:
        key: [B, H, D], float32 or bfloat16.
        value: [B, H, D], same dtype.
        place: int32 [B], the token's position, negative for a row without a token.
        cache_key: [B, H, S, D], same dtype; or codes of this dtype, and then the token is stored as codes.
        cache_value: like ``cache_key``; with ``rows`` either may have all slots.
        cache_position: int32 [B, H, S].
        cursor: int32 [B].
        query: [B, H, G, D] of the same token, same dtype; with ``inv_freq`` only.
        inv_freq: float32 [D/2], radians per position: query and key are rotated (halves layout: pairs (i, i + D/2)) at
            ``place`` first. None stores the key as it is.
        rows: the rows of an offloaded cache. ``cache_key`` and ``cache_value`` are then its copies [B, H, R, D], and the
            token is only written there; codes have the scales of all slots. None if the cache has all slots on the
            device.
        implementation: "pallas_triton" (GPU, D a power of two: one kernel), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    batch, heads, dim = key.shape
    held = cache_key.shape[2]
    slots = held if rows is None else cache_position.shape[2]
    shapes = {
        "value": (value, key.shape, key.dtype),
        "place": (place, (batch,), jnp.int32),
        "cache_key": (cache_key, (batch, heads, held, dim), key.dtype),
        "cache_value": (cache_value, (batch, heads, held if rows is None else cache_value.shape[2], dim), key.dtype),
        "cache_position": (cache_position, (batch, heads, slots), jnp.int32),
        "cursor": (cursor, (batch,), jnp.int32),
    }
    for name, x in (("cache_key", cache_key), ("cache_value", cache_value)):
        if isinstance(x, Quantised):
            groups = (GROUPS,) * x.grouped
            shapes[f"{name}.scale"] = (x.scale, (batch, heads, slots, *groups), jnp.bfloat16)
    if inv_freq is not None:
        shapes["inv_freq"] = (inv_freq, (dim // 2,), jnp.float32)
    if query is not None:
        shapes["query"] = (query, (batch, heads, query.shape[2], dim), key.dtype)
    for name, (array, shape, dtype) in shapes.items():
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"store_token: got {name} {array.dtype} {array.shape}, expected {jnp.dtype(dtype)} {shape}"
            )
    if rows is not None and not 0 <= rows.sinks < min(held, cache_value.shape[2]):
        raise ValueError(
            f"store_token: got sinks={rows.sinks} of {held} and {cache_value.shape[2]} rows, expected fewer"
        )
    if (query is None) != (inv_freq is None):
        raise ValueError("store_token: got one of query and inv_freq, expected both or none")
    arrays = STORE_TOKEN.run(
        key,
        value,
        place,
        cache_key=cache_key,
        cache_value=cache_value,
        cache_position=cache_position,
        cursor=cursor,
        query=query,
        inv_freq=inv_freq,
        rows=rows,
        implementation=implementation,
        platform=platform,
    )
    return Stored(*arrays)
