"""One token joins the open sentence of every list and maybe ends it: the bookkeeping of a decode step, in one launch."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
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
    sinks: int | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, ...]:
    """Number the slot, add key and query to the sums of the open sentence; where it ends, write its mean, begin another.

    Args:
        key: [B, H, S, D], of all slots, the token's among them; or with ``sinks`` copies [B, H, R, D] as
            `pallas_kernels.host.copy_row` lays them out.
        query: [B, H, G, D], of the token.
        cursor: int32 [B], the slot behind the token's.
        event: int32 [B]: `JOINS`, `CLOSES` if the token is the last of its sentence, 0 for rows in which nothing changes.
        state: sentence int32 [B, H, S], of each slot; mean [B, H, N, D], of each finished sentence, any floating dtype;
            count int32 [B, H], finished sentences; over the tokens of the open sentence query_sum float32 [B, H, G, D],
            key_sum float32 [B, H, D], length int32 [B, H]. Rewritten in place where the caller gives them up.
        sinks: see ``key``; None where it has all slots.
        implementation: "pallas_triton" (GPU; G and D powers of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        The new state; a slot past S and a sentence past N are written nowhere.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    sentence, mean, count, query_sum, key_sum, length = state
    rows, heads, _, dim = query.shape
    arrays = (key, cursor, event, *state)
    slots = key.shape[2] if sinks is None else sentence.shape[2]
    expected = [
        (rows, heads, key.shape[2], dim),
        *[(rows,)] * 2,
        (rows, heads, slots),
        (rows, heads, mean.shape[2], dim),
        (rows, heads),
        query.shape,
        (rows, heads, dim),
        (rows, heads),
    ]
    got = [x.shape for x in arrays]
    if got != expected:
        raise ValueError(f"sentence_add: got key, cursor, event and state of {got}, expected {expected}")
    dtypes = [str(x.dtype) for x in (cursor, event, sentence, count, length, query_sum, key_sum)]
    if dtypes != ["int32"] * 5 + ["float32"] * 2:
        raise ValueError(f"sentence_add: got {dtypes}, expected int32 numbers and float32 sums")
    return SENTENCE_ADD.run(
        key, query, cursor, event, state, sinks=sinks, implementation=implementation, platform=platform
    )
