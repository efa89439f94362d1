"""One token joins the open sentence of every list and maybe ends it: the bookkeeping of a decode step, in one launch."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.host import Rows
from pallas_kernels.sentence_add import pallas_triton, reference

__all__ = ["SENTENCE_ADD", "sentence_add"]

SENTENCE_ADD = Operation(
    "sentence_add",
    {
        "pallas_triton": Implementation(pallas_triton.sentence_add, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.sentence_add),
    },
)


def sentence_add(
    key: jax.Array,
    query: jax.Array,
    cursor: jax.Array,
    event: jax.Array,
    state: tuple[jax.Array, ...],
    *,
    rows: Rows | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, ...]:
    """Number the slot, add key and query to the sums of the open sentence; where it ends, write its mean, begin another.

    Args:
        key: [B, H, S, D], the token's slot among them; with ``rows`` the copies [B, H, R, D].
        query: [B, H, G, D], of the token.
        cursor: int32 [B], the slot behind the token's.
        event: int32 [B]: `JOINS`, `CLOSES` if the token is the last of its sentence, 0 for rows in which nothing changes.
        state: sentence int32 [B, H, S], of each slot; mean [B, H, N, D], of each finished sentence, any floating dtype;
            count int32 [B, H], finished sentences; over the tokens of the open sentence query_sum float32 [B, H, G, D],
            key_sum float32 [B, H, D], length int32 [B, H]. Rewritten in place where the caller gives them up.
        rows: of an offloaded cache, whose copies ``key`` then has; None where ``key`` has all slots.
        implementation: "pallas_triton" (GPU; G and D powers of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        The new state; a slot past S and a sentence past N are written nowhere.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    sentence, mean, count, query_sum, key_sum, length = state
    batch, heads, _, dim = query.shape
    arrays = (key, cursor, event, *state)
    slots = key.shape[2] if rows is None else sentence.shape[2]
    expected = [
        (batch, heads, key.shape[2], dim),
        *[(batch,)] * 2,
        (batch, heads, slots),
        (batch, heads, mean.shape[2], dim),
        (batch, heads),
        query.shape,
        (batch, heads, dim),
        (batch, heads),
    ]
    got = [x.shape for x in arrays]
    if got != expected:
        raise ValueError(f"sentence_add: got key, cursor, event and state of {got}, expected {expected}")
    dtypes = [str(x.dtype) for x in (cursor, event, sentence, count, length, query_sum, key_sum)]
    if dtypes != ["int32"] * 5 + ["float32"] * 2:
        raise ValueError(f"sentence_add: got {dtypes}, expected int32 numbers and float32 sums")
    return SENTENCE_ADD.run(
        key,
        query,
        cursor,
        event,
        state,
        rows=rows,
        implementation=implementation,
        platform=platform,
    )
