"""The shape at which `match_select` is timed: MagicPIG's sampling at 128K tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import CONTEXT, GROUP, Shape, few, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """A sixteenth of the tokens, by their buckets in 150 tables of 10 bits.

    Attributes:
        slots: tokens of a row.
        tables: hash tables.
    """

    slots: int = CONTEXT
    tables: int = 150
    chained: ClassVar[str | None] = None

    @property
    def room(self) -> int:
        """Newest slots."""
        return self.slots // 1024 + 1

    @property
    def most(self) -> int:
        """Slots of a list."""
        return self.slots // 16

    @property
    def name(self) -> str:
        return f"{self.most} of {self.slots} keys by {self.tables} tables"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.slots * self.tables * 2

    @property
    def options(self) -> dict[str, Any]:
        return {"first": max(self.slots // 32768, 1), "capacity": self.most, "room": self.room, "num_bits": 10}

    def draw(self, key: Array) -> dict[str, Any]:
        def buckets(key: Array, *shape: int) -> Array:
            # With a tenth of as many buckets as 10 bits allow, some tokens are sampled and not all.
            return jax.random.randint(key, (*self.rows, *shape), 0, 100, jnp.int32).astype(jnp.uint16)

        first, second = jax.random.split(key)
        return {
            "query": buckets(first, GROUP, self.tables),
            "ids": buckets(second, self.tables, self.slots),
            "near": jnp.full((1,), self.slots - self.room, jnp.int32),
            "length": jnp.full((1,), self.slots, jnp.int32),
        }

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots), tables=20)


SHAPES = (Sizes(),)
