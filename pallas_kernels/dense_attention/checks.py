"""The check that `dense_attention` and `column_mass` share."""

from __future__ import annotations


def check_arrays(name, query, key, query_position, key_position, block):
    """Raise ``ValueError`` where shapes or dtypes of operation ``name`` disagree: queries, keys, their positions, a block."""
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
