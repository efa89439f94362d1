"""Checks that operations share: `dense_attention` with `column_mass`, and the operations that attend with a prompt chunk."""

from __future__ import annotations


def check_arrays(name, query, key, query_position, key_position, block):
    """Raise ``ValueError`` if queries, keys and positions given to operation ``name`` disagree, or ``block`` is below 1."""
    agree = (
        query.ndim == 5
        and key.ndim == 4
        and key.shape == (*query.shape[:2], key.shape[2], query.shape[4])
        and query_position.shape == (query.shape[0], query.shape[3])
        and key_position.shape == key.shape[:3]
    )
    if not agree:
        raise ValueError(
            f"{name}: got query {query.shape}, key {key.shape}, query_position {query_position.shape}, "
            f"key_position {key_position.shape}, expected [B, H, G, T, D], [B, H, S, D], [B, T], [B, H, S]"
        )
    if query.dtype != key.dtype:
        raise ValueError(f"{name}: got query {query.dtype} and key {key.dtype}, expected the same dtype")
    if block < 1:
        raise ValueError(f"{name}: got {block=}, expected at least 1 slot")


def check_chunk(name, query, key, value):
    """Raise ``ValueError`` unless a chunk's queries [B, H, G, T, D] fit keys and values [B, H, S, D] with S of at least T."""
    if (
        query.ndim != 5
        or key.shape != (*query.shape[:2], *key.shape[2:3], query.shape[4])
        or value.shape != key.shape
        or key.shape[2] < query.shape[3]
    ):
        raise ValueError(
            f"{name}: got query {query.shape}, key {key.shape}, value {value.shape}, "
            "expected [B, H, G, T, D], [B, H, S, D], [B, H, S, D] with S of at least T"
        )
    if not query.dtype == key.dtype == value.dtype:
        dtypes = [str(x.dtype) for x in (query, key, value)]
        raise ValueError(f"{name}: got dtypes {dtypes}, expected the same dtype")
