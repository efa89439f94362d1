"""MagicPIG's scan: which query heads sample a token, because both are in the same bucket in two hash tables or more."""

from __future__ import annotations

from jax import Array

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.score.bucket_matches import pallas_triton, reference

__all__ = ["BUCKET_MATCHES", "bucket_matches", "check_buckets"]

BUCKET_MATCHES = Operation(
    "bucket_matches",
    {
        "pallas_triton": Implementation(pallas_triton.bucket_matches, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.bucket_matches),
    },
)


def bucket_matches(
    query: Array,
    ids: Array,
    near: Array,
    *,
    first: int,
    num_bits: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Mark the query heads that have the bucket of a token in two tables or more.

    Not differentiable: its results are integers and truth values.

    Args:
        query: uint8 or uint16 [B, H, G, L], the bucket of each query head in each table, below 2**num_bits.
        ids: of the same dtype [B, H, L, N], the bucket of each token. The kernel is fast where N is a multiple of 8.
        near: int32 [B], the slot behind the last one that is searched.
        first: the first slot that is searched.
        num_bits: bits of a bucket.
        implementation: "pallas_triton" (GPU; uint16 with up to 14 bits, up to 8 query heads), "xla", or None for the first
            that runs.
        platform: see ``Operation.run``.

    Returns:
        bool [B, H, G, N]; False in slots that are not searched, which may hold any buckets.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    check_buckets("bucket_matches", query, ids, near)
    return BUCKET_MATCHES.run(
        query, ids, near, first=first, num_bits=num_bits, implementation=implementation, platform=platform
    )


def check_buckets(name: str, query: Array, ids: Array, near: Array) -> None:
    """Raise ``ValueError`` where the arguments of the operation ``name`` disagree."""
    batch, heads, tables, _ = ids.shape
    if query.shape != (batch, heads, query.shape[2], tables) or near.shape != (batch,):
        raise ValueError(
            f"{name}: got query {query.shape}, near {near.shape} for ids {ids.shape}, expected [B, H, G, L], [B] for "
            "[B, H, L, N]"
        )
    kinds = [str(x.dtype) for x in (query, ids, near)]
    if kinds not in [[kind, kind, "int32"] for kind in ("uint8", "uint16")]:
        raise ValueError(f"{name}: got query, ids, near of {kinds}, expected uint8 or uint16 twice, and int32")
