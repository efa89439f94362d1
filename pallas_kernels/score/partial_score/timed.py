"""The shape at which `partial_score` is timed: InfiniGen's search at 128K tokens."""

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
    """

    slots: int = CONTEXT

    @property
    def channels(self) -> int:
        """Channels of the partial keys."""
        return self.dim // 5

    @property
    def name(self) -> str:
        return f"{self.channels} channels of {self.slots} keys"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.slots * (self.channels * BYTES + 4)  # keys and positions

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def draw(self, key: Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        return {
            "query": normal(first, *self.rows, GROUP, self.channels),
            "key": normal(second, *self.rows, self.channels, self.slots),
            "position": positions(self.rows, self.slots),
            "cursor": jnp.full((1,), self.slots, jnp.int32),
            "alpha": jnp.float32(4),
        }

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots))

    def defined(self, result: Any) -> Any:
        # Rounding decides whether a logit at the edge is near. The score of the newest token is inf.
        return jnp.where(jnp.isfinite(result[0]), result[0], 0), result[2]


SHAPES = (Sizes(),)
