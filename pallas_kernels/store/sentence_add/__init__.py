"""Adds one token to the open sentence of every list, and may close the sentence (SentenceKV)."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.host import Rows
from pallas_kernels.store.sentence_add import pallas_triton, reference

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
    """Number the token's slot and add its key and query to the sums of the open sentence.

    If the token closes the sentence, the mean key of the sentence is written, and another sentence begins.

    Differentiable: through ``xla``, the means and sums only.

    Args:
        key: [B, H, S, D], with the token's key in it; with ``rows`` the copies [B, H, R, D].
        query: [B, H, G, D], queries of the token.
        cursor: int32 [B], the slot behind the token's slot.
        event: int32 [B]: `JOINS`; `CLOSES` if the token is the last of its sentence; 0 for a row that does not change.
        state: six arrays, rewritten in place where the caller gives them up. sentence int32 [B, H, S], the sentence of each
            slot; mean [B, H, N, D] in any floating dtype, the mean key of each finished sentence; count int32 [B, H],
            number of finished sentences. Sums over the open sentence: query_sum float32 [B, H, G, D], key_sum float32
            [B, H, D], and length int32 [B, H], its number of tokens.
        rows: the rows of an offloaded cache, if ``key`` is its copies; None if ``key`` has all slots.
        implementation: "pallas_triton" (GPU; G and D powers of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        The new state. A slot past S and a sentence past N are not written.

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
