"""Causal attention of a prompt chunk over listed blocks of keys and listed keys (MInference, XAttention, FlexPrefill)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.attend.dense_attention.checks import check_chunk
from pallas_kernels.attend.sparse_attention import pallas_triton, reference
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["SPARSE_ATTENTION", "sparse_attention"]

SPARSE_ATTENTION = Operation(
    "sparse_attention",
    {
        "pallas_triton": Implementation(pallas_triton.sparse_attention, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.sparse_attention),
    },
    logits=True,
)


def sparse_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    distances: jax.Array,
    first: jax.Array,
    count: jax.Array,
    columns: jax.Array,
    num_columns: jax.Array,
    start: jax.Array | int,
    length: jax.Array,
    block: int,
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attend with T tokens in slots start..start+T-1 of a cache to some of the tokens up to their own.

    Tokens go in blocks of ``block``, which begin at slot 0. Each query head has a list of its own for each block of its
    queries. A query sees: its own block, as far as its own token; the blocks that lie as many blocks before its own as the
    list of its block says; and of the head's columns those before its own block. What is in the list twice, as a block and
    as a column, counts once.

    Not differentiable: ``xla`` loops over blocks of keys up to a traced bound.

    Args:
        query: [B, H, G, T, D], already rotated; float32, bfloat16 or float16.
        key: [B, H, S, D], same dtype; the chunk's own keys are stored in it already.
        value: [B, H, S, D], same dtype.
        distances: int32 [B, H, G, L], lists of distances in blocks, at least 1, without repetition in one list.
        first: int32 [B, H, G, N], where the list of each of the N = ceil(T / block) blocks of queries begins. A head with
            columns has one list for all of its blocks, which begins at 0 and ascends.
        count: int32 [B, H, G, N], the length of each list; no distance in it goes back beyond slot 0.
        columns: int32 [B, H, G, C], ascending slots.
        num_columns: int32 [B, H, G], how many of them are meant.
        start: int32 scalar, may be traced: the slot of the chunk's first token, a multiple of ``block``.
        length: int32 [B], how many tokens of the chunk are real; padding may hold anything, NaN included, and so may the
            slots behind them.
        block: tokens of a block.
        scale: factor of the logits, a Python number.
        implementation: "pallas_triton" (GPU; D and ``block`` powers of two, ``block`` at least 16), "xla", or None for the
            first that runs.
        platform: see ``Operation.run``.

    Returns:
        out [B, H, G, T, D] in the dtype of the query, and lse float32 [B, H, G, T], the log of the softmax denominator;
        0 and -inf for a query that is not real.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    check_chunk("sparse_attention", query, key, value)
    if block < 1:
        raise ValueError(f"sparse_attention: got block={block}, expected at least 1 token")
    lists = {"distances": distances, "first": first, "count": count, "columns": columns, "num_columns": num_columns}
    _check_lists(query.shape, block, length=length, **lists)
    settings = {"block": block, "scale": scale, "implementation": implementation, "platform": platform}
    return SPARSE_ATTENTION.run(query, key, value, start=start, length=length, **lists, **settings)


def _check_lists(shape: tuple[int, ...], block: int, **given: jax.Array) -> None:
    """Raise ``ValueError`` unless the lists are int32 and have the shapes that fit queries of ``shape`` [B, H, G, T, D]."""
    heads, blocks = shape[:3], -(-shape[3] // block)
    expected = {
        "distances": (*heads, *given["distances"].shape[3:4]),
        "first": (*heads, blocks),
        "count": (*heads, blocks),
        "columns": (*heads, *given["columns"].shape[3:4]),
        "num_columns": heads,
        "length": heads[:1],
    }
    for name, wanted in expected.items():
        x = given[name]
        if x.dtype != jnp.int32 or x.shape != wanted or not all(x.shape[3:]):
            told = f"int32 {wanted} without an empty axis"
            raise ValueError(f"sparse_attention: got {name} {x.dtype} {x.shape}, expected {told}")
