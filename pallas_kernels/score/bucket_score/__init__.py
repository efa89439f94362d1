"""SOCKET's search: the score of each token is the sum of soft votes for its buckets in many hash tables."""

from __future__ import annotations

from jax import Array

from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.sign_codes import BLOCK
from pallas_kernels.score.bucket_score import pallas_triton, reference

__all__ = ["BUCKET_SCORE", "bucket_score"]

BUCKET_SCORE = Operation(
    "bucket_score",
    {
        "pallas_triton": Implementation(pallas_triton.bucket_score, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.bucket_score),
    },
)


def bucket_score(
    query: Array,
    planes: Array,
    temperature: Array,
    ids: Array,
    norm: Array,
    position: Array,
    cursor: Array,
    *,
    first: int,
    num_local: int,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Score each token by the norm of its value times how likely the query finds its buckets, summed over tables and group.

    In table l the likelihood of bucket c, whose corner is y_c (a sign for each bit, see `formats.sign_codes`), is
    softmax_c(tanh(W_l q) . y_c / (sqrt(D) * temperature)).

    Differentiable: through ``xla``.

    Args:
        query: [B, H, G, D].
        planes: float32 [L, P, D], the planes W_l of each of L tables.
        temperature: float32 [], above 0.
        ids: uint8 or uint16 [B, H, N, L * 16], the bucket of each key in each table, below 2**P, in blocks of 16 tokens (see
            `formats.sign_codes.in_blocks`); there are S tokens or more, and what is behind S may hold anything.
        norm: [B, H, S], of the values; computed with in float32.
        position: int32 [B, H, S], negative for an empty slot; there ``norm`` may hold anything.
        cursor: int32 [B], the slot behind the newest token.
        first: the first slot that is searched.
        num_local: the newest tokens, which are not searched.
        implementation: "pallas_triton" (GPU; two to eight bits, ids in uint8, D a power of two), "xla", or None for the
            first that runs.
        platform: see ``Operation.run``.

    Returns:
        float32 [B, H, S]; -inf for empty slots and for those that are not searched.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    batch, heads, blocks, width = ids.shape
    slots = position.shape[2]
    rows = planes.shape[0] * BLOCK
    got = query.shape[:2], query.shape[3], rows, norm.shape, position.shape, cursor.shape, temperature.shape
    lists = (batch, heads, slots)
    if got != (lists[:2], planes.shape[2], width, lists, lists, (batch,), ()) or blocks * BLOCK < slots:
        raise ValueError(
            f"bucket_score: got query {query.shape}, planes {planes.shape}, temperature {temperature.shape}, "
            f"norm {norm.shape}, position {position.shape}, cursor {cursor.shape} for ids {ids.shape}, expected "
            "[B, H, G, D], [L, P, D], [], [B, H, S] twice, [B] for [B, H, S / 16 or more, L * 16]"
        )
    dtypes = [str(x.dtype) for x in (planes, temperature, ids, position, cursor)]
    if dtypes not in [["float32", "float32", kind, "int32", "int32"] for kind in ("uint8", "uint16")]:
        raise ValueError(
            f"bucket_score: got planes, temperature, ids, position, cursor of {dtypes}, expected float32 twice, uint8 or "
            "uint16, and int32 twice"
        )
    arrays = query, planes, temperature, ids, norm, position, cursor
    return BUCKET_SCORE.run(*arrays, first=first, num_local=num_local, implementation=implementation, platform=platform)
