"""The slots that a decode step of SentenceKV takes whatever the scores, for arrays and for the scalars of a kernel."""

import dataclasses

import jax
import jax.numpy as jnp

JOINS, CLOSES = 1, 2  # how a token changes the open sentence; 0 means that there is no token


@dataclasses.dataclass(frozen=True)
class Rules:
    """Which slots are taken whatever the scores.

    Attributes:
        sinks: number of first slots.
        recent: least number of newest slots.
        open_cap: the open sentence is among the newest slots, up to this number of its tokens, if that is above ``recent``.
        whole: a step takes everything if the open sentence has so many tokens or fewer.
    """

    sinks: int
    recent: int
    open_cap: int
    whole: int


def bounds(cursor: jax.Array, written: jax.Array, budget: jax.Array, rules: Rules) -> tuple[jax.Array, jax.Array]:
    """Compute the slots between which a step chooses, and how many it chooses.

    Args:
        cursor: int32, the slot behind the newest.
        written: int32, tokens in the open sentence with the step's own; 0 if that token closes it.
        budget: int32, slots taken in all.
        rules: see `Rules`. All arrays have the same shape.

    Returns:
        high int32: slots from there on are all taken, as are slots below ``rules.sinks``; it is 0 where everything is taken.
        space int32: how many slots between are taken.
    """
    free = budget - rules.sinks
    recent = jnp.minimum(jnp.maximum(rules.recent, jnp.minimum(written, rules.open_cap)), free)
    return jnp.where(written <= rules.whole, 0, cursor - recent), jnp.maximum(free - recent, 0)
