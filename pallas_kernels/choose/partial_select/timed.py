"""The shape at which `partial_select` is timed: InfiniGen's lists at 128K tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, CONTEXT, GROUP, Shape, few, normal, positions, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """A fifth of the channels of all keys.

    Attributes:
        slots: tokens of a row.
        best: the budget.
    """

    slots: int = CONTEXT
    best: int = 1024

    @property
    def channels(self) -> int:
        """Channels of the partial keys."""
        return self.dim // 5

    @property
    def name(self) -> str:
        return f"{self.best} of {self.slots} keys by {self.channels} channels"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.slots * (self.channels * BYTES + 4)  # keys and positions

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale, "capacity": self.best + 1, "total": _alone, "query_heads": self.heads * GROUP}

    def draw(self, key: Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        return {
            "query": normal(first, *self.rows, GROUP, self.channels),
            "key": normal(second, *self.rows, self.channels, self.slots),
            "position": positions(self.rows, self.slots),
            "cursor": jnp.full((1,), self.slots, jnp.int32),
            "alpha": jnp.float32(4),
            "budget": jnp.int32(self.best),
        }

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots), best=few(self.best))

    def defined(self, result: Any) -> Any:  # rounding decides between scores at the cut
        return result[1]


def _alone(x: Array) -> Array:
    """Return the sum over one device."""
    return x


SHAPES = (Sizes(),)
