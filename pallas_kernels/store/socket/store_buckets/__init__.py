"""Upkeep of SOCKET's index when tokens have been stored: their buckets, and the norms of their values."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.host import Rows
from pallas_kernels.signature import declared, forward
from pallas_kernels.store.socket.store_buckets import pallas_triton, reference

STORE_BUCKETS = Operation.of("store_buckets", pallas_triton, reference, in_place=True)


@declared(STORE_BUCKETS, derivative="through ``xla``, the norms only")
def store_buckets(
    key: Annotated[Array, "B H S D; B H _ D with rows"],
    value: Annotated[Array, "B H S D; B H _ D with rows"],
    active: Annotated[Array, "int32 B T"],
    cursor: Annotated[Array, "int32 B"],
    planes: Annotated[Array, "float32 L P D"],
    ids: Annotated[Array, "uint8|uint16 B H N>=S/16 L*16"],
    norm: Annotated[Array, "B H S"],
    *,
    rows: Rows | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Put tokens that were just stored into the hash tables; in place where arrays are donated.

    Args:
        key: the cache with the tokens in it; with ``rows`` the copies.
        value: like ``key``; there may be another number of copies.
        active: negative for padding, which stands behind the real tokens.
        cursor: the slot behind the newest token. A token whose slot is S or more is dropped.
        planes: see `formats.sign_codes`.
        ids: the bucket of each key in each table, in blocks of 16 tokens (see `formats.sign_codes.in_blocks`).
        norm: of the values; computed in float32.
        rows: the rows of an offloaded cache, if ``key`` and ``value`` are its copies.
        implementation: "pallas_triton" takes T = 1, D a power of two.

    Returns:
        The new ids and norm.
    """
    return forward()
