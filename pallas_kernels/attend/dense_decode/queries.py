"""Several queries of a row as rows of one product, in kernels: query t of query head g is row ``g * T + t``."""

from __future__ import annotations

from typing import Any

import jax


def asked_positions(ref: Any, row: Any, index: jax.Array) -> jax.Array | None:
    """Load the position of the query in each of the rows ``index`` int32 [R] of a product; None without positions.

    Args:
        ref: int32 [B, T], or None where there is one query per head.
        row: of the batch.
        index: below G * T.
    """
    return None if ref is None else ref[row, jax.lax.rem(index, ref.shape[1])]


def visible(held: jax.Array, position: jax.Array, asked: jax.Array | None) -> jax.Array:
    """Tell which slots each row of a product sees: bool [R, N], or [1, N] for all rows alike.

    Args:
        held: bool [N], whether a slot holds a token that may enter.
        position: int32 [N], in tokens.
        asked: int32 [R], as `asked_positions` returns it.
    """
    return held[None, :] if asked is None else held[None, :] & (position[None, :] <= asked[:, None])
