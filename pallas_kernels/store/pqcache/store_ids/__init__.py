"""Upkeep of PQCache's index when tokens have been stored: the numbers of the centroids that are nearest to their keys."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.formats import bit_codes
from pallas_kernels.host import Rows
from pallas_kernels.signature import INTEGERS, declared, forward
from pallas_kernels.store.pqcache.store_ids import pallas_triton, reference
from pallas_kernels.store.pqcache.store_ids.reference import code_of, nearest

__all__ = ["STORE_IDS", "code_of", "nearest", "store_ids"]

STORE_IDS = Operation.of("store_ids", pallas_triton, reference, in_place=True)


@declared(STORE_IDS, derivative=INTEGERS)
def store_ids(
    key: Annotated[Array, "B H S D"],
    active: Annotated[Array, "int32 B T"],
    cursor: Annotated[Array, "int32 B"],
    centroids: Annotated[Array, "float32 B H M C D/M"],
    ids: Annotated[Array, "uint8 B H N _"],
    *,
    rows: Rows | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Add the codes of tokens that were just stored; in place where the array is donated.

    Args:
        key: the cache with the tokens in it; with ``rows`` the copies, all tokens' among them.
        active: negative for padding, which stands behind the real tokens.
        centroids: of each part of the channels; of equally near ones the first is taken.
        ids: codes of slots (`pallas_kernels.formats.bit_codes`), 0 in the slots of the tokens.
        implementation: "pallas_triton" takes T = 1.

    Returns:
        The new ids.
    """
    parts, count = centroids.shape[2:4]
    size = bit_codes.together(parts * bit_codes.bits_of(count))[1]
    if ids.shape[3] != size:
        raise ValueError(f"store_ids: got ids {ids.shape}, expected {size} bytes for centroids {centroids.shape}")
    return forward()
