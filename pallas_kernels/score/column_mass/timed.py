"""The shape at which `column_mass` is timed: a cache of H2O with 1,024 tokens and the newest token."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, GROUP, Shape, positions, query_key_value, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """A row of a cache, and the query of a decode step.

    Attributes:
        slots: tokens of the row.
    """

    slots: int = 1025

    @property
    def name(self) -> str:
        return f"one query, {self.slots} tokens, 1 row"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.slots * (self.dim * BYTES + 4)

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def draw(self, key: Array) -> dict[str, Any]:
        query, keys, _ = query_key_value(key, self, self.slots)
        return {
            "query": query[..., None, :],
            "key": keys,
            "lse": jnp.full((*self.rows, GROUP, 1), math.log(self.slots), jnp.float32),
            "query_position": jnp.full((1, 1), self.slots, jnp.int32),
            "key_position": positions(self.rows, self.slots),
        }

    def tiny(self) -> Self:
        return small(self, slots=17)


SHAPES = (Sizes(),)
