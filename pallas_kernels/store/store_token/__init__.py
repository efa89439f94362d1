"""Stores one token per row in a cache and rotates its key and query: all that a decode step does before attention."""

import dataclasses
from typing import Annotated

import jax.numpy as jnp
from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.formats.quantised import GROUPS, Quantised
from pallas_kernels.host import Rows
from pallas_kernels.signature import declared, forward
from pallas_kernels.store.store_token import pallas_mosaic_gpu, pallas_triton, reference

__all__ = ["STORE_TOKEN", "Stored", "store_token"]

STORE_TOKEN = Operation.of("store_token", pallas_triton, pallas_mosaic_gpu, reference, in_place=True)


@dataclasses.dataclass(frozen=True)
class Stored:
    """The arrays of a cache with one more token, and the query that goes with it."""

    key: Array | Quantised  # [B, H, S, D], as it was given
    value: Array | Quantised  # [B, H, S, D]
    position: Array  # int32 [B, H, S]
    cursor: Array  # int32 [B]
    query: Array | None  # [B, H, G, D], rotated


@declared(STORE_TOKEN, derivative="through ``xla``, the keys, values and query only")
def store_token(
    key: Annotated[Array, "B H D"],
    value: Annotated[Array, "like key"],
    place: Annotated[Array, "int32 B"],
    *,
    cache_key: Annotated[Array | Quantised, "like key B H S D; B H R D with rows"],
    cache_value: Annotated[Array | Quantised, "like key B H S D; B H _ D with rows"],
    cache_position: Annotated[Array, "int32 B H S"],
    cursor: Annotated[Array, "int32 B"],
    query: Annotated[Array | None, "like key B H G D"] = None,
    inv_freq: Annotated[Array | None, "float32 D/2"] = None,
    rows: Rows | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> Stored:
    """Write the token of row b to slot ``cursor[b]`` of every head and move the cursor; in place where arrays are donated.

    A row with a negative ``place`` keeps its cache and its cursor. A full row, whose cursor is S or more, stores nothing, but
    its cursor moves.

    Args:
        key: float32 or bfloat16.
        place: the token's position, negative for a row without a token.
        cache_key: keys; or codes, and then the token is stored as codes.
        cache_value: like ``cache_key``; with ``rows`` either may have all slots.
        query: of the same token; with ``inv_freq`` only.
        inv_freq: radians per position: query and key are rotated (halves layout: pairs (i, i + D/2)) at ``place`` first.
            None stores the key as it is.
        rows: the rows of an offloaded cache. ``cache_key`` and ``cache_value`` are then its copies, and the token is only
            written there; codes have the scales of all slots. None if the cache has all slots on the device.
        implementation: "pallas_triton" is one kernel; D a power of two.
    """
    for name, x in (("cache_key", cache_key), ("cache_value", cache_value)):
        if isinstance(x, Quantised):
            expected, scale = (*cache_position.shape, *(GROUPS,) * x.grouped), x.scale
            if (scale.shape, scale.dtype) != (expected, jnp.bfloat16):
                raise ValueError(f"store_token: got {name}.scale {scale.dtype} {scale.shape}, expected bfloat16 {expected}")
    copies = min(cache_key.shape[2], cache_value.shape[2])
    if rows is not None and not 0 <= rows.sinks < copies:
        raise ValueError(f"store_token: got rows.sinks={rows.sinks}, expected fewer than the {copies} copies")
    if (query is None) != (inv_freq is None):
        raise ValueError("store_token: got one of query and inv_freq, expected both or none")
    return forward(lambda arrays: Stored(*arrays))
