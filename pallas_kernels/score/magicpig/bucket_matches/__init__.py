"""MagicPIG's scan: which query heads sample a token, because both are in the same bucket in two hash tables or more."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.score.magicpig.bucket_matches import pallas_triton, reference
from pallas_kernels.signature import INTEGERS, declared, forward

BUCKET_MATCHES = Operation.of("bucket_matches", pallas_triton, reference)


@declared(BUCKET_MATCHES, derivative=INTEGERS)
def bucket_matches(
    query: Annotated[Array, "uint8|uint16 B H G L"],
    ids: Annotated[Array, "like query B H L N"],
    near: Annotated[Array, "int32 B"],
    *,
    first: int,
    num_bits: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Mark the query heads that have the bucket of a token in two tables or more.

    Args:
        query: the bucket of each query head in each table, below 2**num_bits.
        ids: the bucket of each token. The kernel is fast where N is a multiple of 8.
        near: the slot behind the last one that is searched.
        first: the first slot that is searched.
        num_bits: bits of a bucket.
        implementation: "pallas_triton" takes uint16 with up to 14 bits, up to 8 query heads.

    Returns:
        bool [B, H, G, N]; False in slots that are not searched, which may hold any buckets.
    """
    return forward()
