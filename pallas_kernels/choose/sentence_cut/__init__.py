"""Tokens of the best sentences (SentenceKV): slots rank by the score of their sentence, and the last sentence may be cut."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.choose.sentence_cut import pallas_triton, reference
from pallas_kernels.choose.sentence_cut.rules import CLOSES, JOINS, Rules, bounds
from pallas_kernels.dispatch import Implementation, Operation

__all__ = ["CLOSES", "JOINS", "SENTENCE_CUT", "Rules", "bounds", "sentence_cut"]

SENTENCE_CUT = Operation(
    "sentence_cut",
    {
        "pallas_triton": Implementation(pallas_triton.sentence_cut, ("gpu",), pallas_triton.check),
        "xla": Implementation(reference.sentence_cut),
    },
)


def sentence_cut(
    score: jax.Array,
    sentence: jax.Array,
    position: jax.Array,
    count: jax.Array,
    length: jax.Array,
    cursor: jax.Array,
    event: jax.Array,
    budget: jax.Array | int,
    *,
    rules: Rules,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """List the slots that a decode step of SentenceKV attends to, ascending: first, newest, and the best between them.

    Between the sinks and ``high`` (see `bounds`) the slots of finished sentences are eligible. Sentences are taken from the
    best on, and of equal scores the lower number first. The tokens of a sentence are taken from its first on. Taking stops
    when ``space`` slots are taken.

    Not differentiable: its results are integers and truth values.

    Args:
        score: float32 [B, H, N], of each sentence; NaN and -inf rank last.
        sentence: int32 [B, H, S], number of each slot's sentence, negative for none; the numbers never fall from one numbered
            slot to the next.
        position: int32 [B, H, S], negative for an empty slot.
        count: int32 [B, H], finished sentences, at most N.
        length: int32 [B, H], tokens of the open sentence without the step's own.
        cursor: int32 [B], the slot behind the newest token.
        event: int32 [B], whether the step's token `JOINS` the open sentence or `CLOSES` it.
        budget: how many slots are taken in all, a number or an int32 scalar.
        rules: which slots are taken whatever the scores.
        implementation: "pallas_triton" (GPU; S up to 16,384), "xla", or None for the first that runs.
        platform: see ``Operation.run``.

    Returns:
        slots int32 [B, H, S], the taken slots ascending and 0 behind them, and bool [B, H, S], true where a slot is listed.

    Raises:
        ValueError: shapes or dtypes disagree, or the implementation is unknown.
        NotImplementedError: the named implementation cannot run here.
    """
    lists = score.shape[:2]
    arrays = (score, sentence, position, count, length, cursor, event)
    expected = [score.shape, *[(*lists, sentence.shape[-1])] * 2, *[lists] * 2, *[lists[:1]] * 2]
    if score.ndim != 3 or [x.shape for x in arrays] != expected:
        raise ValueError(
            f"sentence_cut: got score, sentence, position, count, length, cursor and event of {[x.shape for x in arrays]}, "
            "expected [B, H, N], [B, H, S] twice, [B, H] twice, [B] twice"
        )
    dtypes = [str(x.dtype) for x in arrays]
    if dtypes != ["float32"] + ["int32"] * 6:
        raise ValueError(f"sentence_cut: got {dtypes}, expected a float32 score and int32")
    return SENTENCE_CUT.run(
        *arrays, jnp.asarray(budget, jnp.int32), rules=rules, implementation=implementation, platform=platform
    )
