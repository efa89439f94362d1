"""What a decode step of SentenceKV takes before it looks at scores; on arrays, and on the scalars of a kernel."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

JOINS, CLOSES = 1, 2  # what a token does to the open sentence; 0: there is no token


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is taken whatever the scores.

    Attributes:
        sinks: first slots.
        recent: newest slots, at least.
        open_cap: so many of the open sentence at most are newest slots that are taken, over ``recent``.
        whole: a step with so many tokens in the open sentence, or fewer, takes everything.
    """

    sinks: int
    recent: int
    open_cap: int
    whole: int


def bounds(cursor: jax.Array, written: jax.Array, budget: jax.Array, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """Between which slots a step chooses, and how many.

    Args:
        cursor: int32, the slot behind the newest.
        written: int32, tokens in the open sentence, the step's own included; 0 where that one closes it.
        budget: int32, slots taken in all.
        rules: see `Rules`. All arrays have one shape.

    Returns:
        high int32, the slot from which on all are taken, as are those below ``rules.sinks``; 0 where everything is taken.
        space int32, how many of those between are taken.
    """
    free = budget - rules.sinks
    recent = jnp.minimum(jnp.maximum(rules.recent, jnp.minimum(written, rules.open_cap)), free)
    return jnp.where(written <= rules.whole, 0, cursor - recent), jnp.maximum(free - recent, 0)
