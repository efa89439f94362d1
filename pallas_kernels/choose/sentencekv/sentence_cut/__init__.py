"""Tokens of the best sentences (SentenceKV): slots rank by the score of their sentence, and the last sentence may be cut."""

from typing import Annotated

import jax.numpy as jnp
from jax import Array

from pallas_kernels.choose.sentencekv.sentence_cut import pallas_mosaic_gpu, pallas_triton, reference
from pallas_kernels.choose.sentencekv.sentence_cut.rules import CLOSES, JOINS, Rules, bounds
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import INTEGERS, declared, forward

__all__ = ["CLOSES", "JOINS", "SENTENCE_CUT", "Rules", "bounds", "sentence_cut"]

SENTENCE_CUT = Operation.of("sentence_cut", pallas_mosaic_gpu, pallas_triton, reference)


@declared(SENTENCE_CUT, derivative=INTEGERS)
def sentence_cut(
    score: Annotated[Array | None, "float32 B H N"],
    sentence: Annotated[Array, "int32 B H S"],
    position: Annotated[Array, "int32 B H S"],
    count: Annotated[Array, "int32 B H"],
    length: Annotated[Array, "int32 B H"],
    cursor: Annotated[Array, "int32 B"],
    event: Annotated[Array, "int32 B"],
    budget: Annotated[Array | int, "int32 []"],
    *,
    rules: Rules,
    query: Annotated[Array | None, "floating B H G D"] = None,
    vector: Annotated[Array | None, "floating B H N D"] = None,
    added: Annotated[Array | None, "float32 B H G D"] = None,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """List the slots that a decode step of SentenceKV attends to, ascending: first, newest, and the best between them.

    Between the sinks and ``high`` (see `bounds`) the slots of finished sentences are eligible. Sentences are taken from the
    best on, and of equal scores the lower number first. The tokens of a sentence are taken from its first on. Taking stops
    when ``space`` slots are taken.

    Args:
        score: of each sentence; NaN and -inf rank last. None: that of `vector_score` for ``query``, ``vector`` and ``added``.
        sentence: number of each slot's sentence, negative for none; the numbers never fall from one numbered slot to the
            next.
        count: finished sentences, at most N.
        length: tokens of the open sentence without the step's own.
        event: whether the step's token `JOINS` the open sentence or `CLOSES` it.
        budget: how many slots are taken in all.
        rules: which slots are taken whatever the scores.
        query: given exactly with ``vector`` and without ``score``.
        vector: of each sentence; those from ``count`` on may hold anything.
        added: see `vector_score`.
        implementation: "pallas_triton" takes S up to 16,384.

    Returns:
        slots int32 [B, H, S], the taken slots ascending and 0 behind them, and bool [B, H, S], true where a slot is listed.
    """
    if (score is None) == (query is None) or (query is None) != (vector is None):
        raise ValueError("sentence_cut: got score with query or vector, or none of them, expected score, or query and vector")
    return forward(budget=jnp.asarray(budget, jnp.int32))
