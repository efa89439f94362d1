"""Several queries of a row as rows of one product, in kernels: query t of query head g is row ``g * T + t``."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._triton.online_softmax import store_logits


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


def store_first(
    refs: Sequence[Any],
    at: tuple[Any, Any],
    index: jax.Array,
    slots: jax.Array,
    logits: jax.Array,
    held: jax.Array,
    asked_ref: Any,
) -> None:
    """Store the logits of the first of several queries, or of one query: in one array or in none.

    Args:
        refs: the arrays, [B, H, G, S], or [B, H, G + 1, S] for several queries: a masked store of the interpreter writes what
            it has read, so the other queries have a row of their own, which a GPU does not touch.
        at: row and KV head.
        index: int32 [R], the query of each row of the product, below G * T.
        slots: int32 [N].
        logits: float32 [R, N], -inf where the query does not see the slot.
        held: bool [N], whether a slot holds a token that may enter.
        asked_ref: int32 [B, T], or None where there is one query per head.
    """
    if asked_ref is None:
        store_logits(refs, at, index, slots, logits, held)
        return
    for ref in refs:
        tokens, spare = asked_ref.shape[1], ref.shape[2] - 1
        first = jax.lax.rem(index, tokens) == 0
        head = jnp.where(first, jax.lax.div(index, tokens), spare)
        store_logits([ref], at, head, slots, logits, held[None, :] & first[:, None])
