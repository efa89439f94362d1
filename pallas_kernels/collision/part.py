"""Where a device has a part of the slots of each row, and the candidates are those of all parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Part(NamedTuple):
    """One of n parts of the slots. A part with a higher number has higher slots."""

    begin: Array | int  # int32 [], the first slot of the part among those of all parts
    number: Array | int  # int32 [], 0 to n - 1
    every: Callable[[Array], Array]  # from an array of each part the arrays of all parts, [n, ...]

    def zone(self, first: int, stop: Array, slots: int) -> tuple[Array, Array]:
        """The slots of the zone that are here: the first, int32 [], and the one behind the last, int32 [B]."""
        return jnp.clip(first - self.begin, 0, slots), jnp.clip(stop - self.begin, 0, slots)

    def reach(self, own: Array) -> tuple[Array, Array]:
        """Of the keys here that have each number of votes, int32 [B, H, V]: the sum over all parts, and over those before."""
        every = self.every(own)
        before = jnp.arange(len(every), dtype=jnp.int32)[:, None, None, None] < self.number
        return every.sum(axis=0), jnp.where(before, every, 0).sum(axis=0)


def kept_here(own: Array, whole: Array, before: Array, cut: Array, wanted: Array) -> tuple[Array, Array]:
    """Where the cut lies in a part.

    Args:
        own: int32 [B, H, V], how many keys of the part have each number of votes or more.
        whole: the same of all parts.
        before: the same of the parts before it.
        cut: int32 [B, H], the number of votes of which not all keys may be candidates.
        wanted: int32 [B, H], candidates of all parts.

    Returns:
        int32 [B, H] each: how many keys at the cut are candidates of this part, at most; and how many candidates it has.
    """

    def at(counts: Array, votes: Array) -> Array:  # none has more votes than there are
        inside = votes < counts.shape[2]
        found = jnp.take_along_axis(counts, jnp.where(inside, votes, 0)[..., None], axis=2)[..., 0]
        return jnp.where(inside, found, 0)

    left = jnp.maximum(wanted - at(whole, cut + 1) - (at(before, cut) - at(before, cut + 1)), 0)
    above = at(own, cut + 1)
    return left, above + jnp.minimum(at(own, cut) - above, left)
