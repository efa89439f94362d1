"""What a search of later steps reads of a step's token: some channels of its key, and its query (InfiniGen)."""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.host import Rows
from pallas_kernels.store.store_partial import pallas_triton, reference

__all__ = ["STORE_PARTIAL", "store_partial"]

STORE_PARTIAL = Operation(
    "store_partial",
    {
        "pallas_triton": Implementation(pallas_triton.store_partial, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.store_partial),
    },
)


def store_partial(
    key: jax.Array,
    position: jax.Array,
    cursor: jax.Array,
    matrix: jax.Array,
    query: jax.Array,
    place: jax.Array,
    partial: jax.Array,
    last: jax.Array,
    *,
    rows: Rows | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write the key in slot ``cursor - 1`` times the matrix of its head, in float32, to the same slot of the partial keys.

    Of partial keys the slots are the last axis (`pallas_kernels.score.partial_score`).

    A row without tokens, a full row that could not store its token, and a head without the newest token change no key. The
    query replaces the query of an earlier step in rows whose step has a token.

    Differentiable: through ``xla``.

    Args:
        key: [B, H, S, D], floating point; with ``rows`` the copies [B, H, R, D].
        position: int32 [B, H, S], negative for an empty slot.
        cursor: int32 [B], the slot behind the newest token.
        matrix: float32 [B, H, D, C].
        query: [B, H, G, D] in the dtype of the key, of this step.
        place: int32 [B], negative in a row whose step has no token.
        partial: [B, H, C, N] in the dtype of the key, N at least S. Rewritten in place where the caller gives it up.
        last: [B, H, G, D] in the dtype of the key, the query of the last step that had a token. Rewritten in place too.
        rows: the rows of an offloaded cache, if ``key`` is its copies; None if ``key`` has all slots.
        implementation: "pallas_triton" (GPU; D a power of two), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        partial and last.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    slots = (*key.shape[:2], key.shape[2] if rows is None else position.shape[2])
    args = position, cursor, matrix, query, place, partial, last
    got, channels = [x.shape for x in args], matrix.shape[-1:]
    queries = (*key.shape[:2], *query.shape[2:3], key.shape[3])
    expected = [slots, key.shape[:1], (*key.shape[:2], key.shape[3], *channels)]
    expected += [queries, key.shape[:1], (*key.shape[:2], *channels, max(partial.shape[-1], slots[2])), queries]
    dtypes, like = [str(x.dtype) for x in args], str(key.dtype)
    if got != expected or dtypes != ["int32", "int32", "float32", like, "int32", like, like]:
        raise ValueError(
            f"store_partial: got position, cursor, matrix, query, place, partial, last of {got}, {dtypes}, expected "
            f"{expected}, int32 twice, float32, {like}, int32 and {like} twice"
        )
    return STORE_PARTIAL.run(key, *args, rows=rows, implementation=implementation, platform=platform)
