"""Adds one token to the open sentence of every list, and may close the sentence (SentenceKV)."""

from typing import Annotated

from jax import Array

from pallas_kernels.dispatch import Operation
from pallas_kernels.host import Rows
from pallas_kernels.signature import declared, forward
from pallas_kernels.store.sentencekv.sentence_add import pallas_mosaic_gpu, pallas_triton, reference

SENTENCE_ADD = Operation.of("sentence_add", pallas_triton, pallas_mosaic_gpu, reference, in_place=True)


@declared(SENTENCE_ADD, derivative="through ``xla``, the means and sums only")
def sentence_add(
    key: Annotated[Array, "B H S D; B H R D with rows"],
    query: Annotated[Array, "B H G D"],
    cursor: Annotated[Array, "int32 B"],
    event: Annotated[Array, "int32 B"],
    state: Annotated[
        tuple[Array, ...],
        "int32 B H S", "floating B H N D", "int32 B H", "float32 B H G D", "float32 B H D", "int32 B H",
    ],
    *,
    rows: Rows | None = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, ...]:  # fmt: skip
    """Number the token's slot and add its key and query to the sums of the open sentence.

    If the token closes the sentence, the mean key of the sentence is written, and another sentence begins.

    Args:
        key: with the token's key in it; with ``rows`` the copies.
        query: queries of the token.
        cursor: the slot behind the token's slot.
        event: `JOINS`; `CLOSES` if the token is the last of its sentence; 0 for a row that does not change.
        state: the sentence of each slot; the mean key of each finished sentence; the number of finished sentences; and over
            the open sentence the sums of queries and of keys, and its number of tokens. Rewritten in place where the caller
            gives them up.
        implementation: "pallas_triton" takes G and D powers of two.

    Returns:
        The new state. A slot past S and a sentence past N are not written.
    """
    return forward()
