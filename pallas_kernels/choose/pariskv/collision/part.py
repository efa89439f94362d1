"""One device's part of the slots of each row, where candidates are chosen among all parts."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array


class Part(NamedTuple):
    """One of n parts of the slots. A part with a higher number has higher slots."""

    begin: Array | int  # int32 [], the first slot of the part, counted over all parts
    number: Array | int  # int32 [], 0 to n - 1
    every: Callable[[Array], Array]  # gathers an array of each part to the arrays of all parts, [n, ...]

    def zone(self, first: int, stop: Array, slots: int) -> tuple[Array, Array]:
        """Return the zone's slots in this part: the first slot, int32 [], and the slot behind the last, int32 [B]."""
        return jnp.clip(first - self.begin, 0, slots), jnp.clip(stop - self.begin, 0, slots)

    def share_out(self, own: Array, wanted: Array) -> tuple[Array, Array, Array, Array]:
        """Find the cut among the votes, and the candidates that it leaves to this part.

        Args:
            own: int32 [B, H, V], how many keys of the part have each number of votes or more.
            wanted: int32 [B, H], candidates of all parts; there are as many keys.

        Returns:
            ``own`` summed over all parts; and int32 [B, H] each: the number of votes at the cut, where not all keys may be
            candidates; how many keys at the cut are candidates of this part; and how many candidates the part has.
        """
        every = self.every(own)
        earlier = jnp.arange(len(every), dtype=jnp.int32)[:, None, None, None] < self.number
        whole, before = every.sum(axis=0), jnp.where(earlier, every, 0).sum(axis=0)
        cut = jnp.maximum(jnp.sum(whole >= wanted[..., None], axis=2, dtype=jnp.int32) - 1, 0)

        def at(counts: Array, votes: Array) -> Array:  # none has more votes than there are
            inside = votes < counts.shape[2]
            found = jnp.take_along_axis(counts, jnp.where(inside, votes, 0)[..., None], axis=2)[..., 0]
            return jnp.where(inside, found, 0)

        left = jnp.maximum(wanted - at(whole, cut + 1) - (at(before, cut) - at(before, cut + 1)), 0)
        above = at(own, cut + 1)
        return whole, cut, left, above + jnp.minimum(at(own, cut) - above, left)
