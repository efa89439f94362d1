"""Causal attention of a prompt chunk over listed blocks of keys and listed keys (MInference, XAttention, FlexPrefill)."""

from typing import Annotated

from jax import Array

from pallas_kernels.attend.sparse_attention import pallas_triton, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import LOOP, declared, forward

SPARSE_ATTENTION = Operation.of("sparse_attention", pallas_triton, reference, logits=True)


@declared(SPARSE_ATTENTION, derivative=LOOP)
def sparse_attention(
    query: Annotated[Array, "B H G T D"],
    key: Annotated[Array, "like query B H S>=T D"],
    value: Annotated[Array, "like key"],
    *,
    distances: Annotated[Array, "int32 B H G L>=1"],
    first: Annotated[Array, "int32 B H G ceil(T/block)"],
    count: Annotated[Array, "int32 B H G ceil(T/block)"],
    columns: Annotated[Array, "int32 B H G C>=1"],
    num_columns: Annotated[Array, "int32 B H G"],
    start: Annotated[Array | int, "int32 []"],
    length: Annotated[Array, "int32 B"],
    block: Annotated[int, ">=1"],
    scale: float,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Attend with T tokens in slots start..start+T-1 of a cache to some of the tokens up to their own.

    Tokens go in blocks of ``block``, which begin at slot 0. Each query head has a list of its own for each block of its
    queries. A query sees: its own block, as far as its own token; the blocks that lie as many blocks before its own as the
    list of its block says; and of the head's columns those before its own block. What is in the list twice, as a block and
    as a column, counts once.

    Args:
        query: already rotated; float32, bfloat16 or float16.
        key: the chunk's own keys are stored in it already.
        distances: lists of distances in blocks, at least 1, without repetition in one list.
        first: where the list of each block of queries begins. A head with columns has one list for all of its blocks, which
            begins at 0 and ascends.
        count: the length of each list; no distance in it goes back beyond slot 0.
        columns: ascending slots.
        num_columns: how many of them are meant.
        start: may be traced: the slot of the chunk's first token, a multiple of ``block``.
        length: how many tokens of the chunk are real; padding may hold anything, NaN included, and so may the slots behind
            them.
        block: tokens of a block.
        implementation: "pallas_triton" takes D and ``block`` powers of two, ``block`` at least 16.

    Returns:
        out [B, H, G, T, D] in the dtype of the query, and lse float32 [B, H, G, T], the log of the softmax denominator;
        0 and -inf for a query that is not real.
    """
    return forward()
