"""Tokens of the best sentences in plain JAX: every slot sorted by the score of its sentence."""

import jax.numpy as jnp

from pallas_kernels.choose.sentencekv.sentence_cut.rules import CLOSES, bounds
from pallas_kernels.score.vector_score.reference import vector_score


def sentence_cut(
    score, sentence, position, count, length, cursor, event, budget, *, rules, query=None, vector=None, added=None
):  # fmt: skip
    """List the first, the newest and the best slots between them by sentence, in plain JAX."""
    if score is None:
        score = vector_score(query, vector, count, added=added, reduce="sum", position=None, first=0)
    num_slots = sentence.shape[2]
    written = jnp.where(event[:, None] == CLOSES, 0, length + 1)
    cursor, budget = jnp.broadcast_to(cursor[:, None], written.shape), jnp.broadcast_to(budget, written.shape)
    high, space = bounds(cursor, written, budget, rules)
    slot = jnp.arange(num_slots, dtype=jnp.int32)[None, None]
    stored = position >= 0
    inside = (slot >= rules.sinks) & (slot < high[..., None])
    eligible = stored & inside & (sentence >= 0) & (sentence < count[..., None])
    worth = jnp.take_along_axis(score, jnp.where(eligible, sentence, 0), axis=2)
    least = jnp.finfo(jnp.float32).min
    worth = jnp.where(eligible, jnp.where(worth > least, worth, least), -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-worth, axis=2, stable=True), axis=2)
    taken = (stored & ~inside) | (eligible & (rank < space[..., None]))
    slots = jnp.sort(jnp.where(taken, slot, num_slots), axis=2)
    listed = slots < num_slots
    return jnp.where(listed, slots, 0), listed
