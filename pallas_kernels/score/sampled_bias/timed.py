"""The shape at which `sampled_bias` is timed: MagicPIG's corrections at 128K tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, CONTEXT, GROUP, Shape, few, lists, normal, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """The sampled sixteenth of the tokens.

    Attributes:
        slots: tokens of a row.
        tables: hash tables.
    """

    slots: int = CONTEXT
    tables: int = 150

    @property
    def most(self) -> int:
        """Slots of a list."""
        return self.slots // 16

    @property
    def name(self) -> str:
        return f"{self.most} of {self.slots} keys"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.most * self.dim * BYTES

    @property
    def options(self) -> dict[str, Any]:
        return {"first": max(self.slots // 32768, 1), "num_tables": self.tables, "num_bits": 10}

    def draw(self, key: Array) -> dict[str, Any]:
        keys = jax.random.split(key, 4)
        return {
            "query": normal(keys[0], *self.rows, GROUP, self.dim),
            "key": normal(keys[1], *self.rows, self.slots, self.dim),
            "centre": jnp.zeros((*self.rows, self.dim), jnp.float32),
            "slots": lists(keys[2], self.rows, self.slots, self.most),
            "own": normal(keys[3], *self.rows, GROUP, self.most) > 0,
            "near": jnp.full((1,), self.slots - self.slots // 1024 - 1, jnp.int32),
        }

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots), tables=20)

    def defined(self, result: Any) -> Any:
        return jnp.exp(-result)


SHAPES = (Sizes(),)
