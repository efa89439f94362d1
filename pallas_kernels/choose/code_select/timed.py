"""The shape at which `code_select` is timed: PQCache's search at 128K tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.choose.code_select import code_bits
from pallas_kernels.formats import bit_codes
from pallas_kernels.formats.shapes import CONTEXT, GROUP, Shape, few, normal, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """A twentieth of the tokens by their codes, and as many of the newest.

    Attributes:
        slots: tokens of a row.
        parts: parts of the channels M.
        count: centroids of a part.
    """

    slots: int = CONTEXT
    parts: int = 2
    count: int = 64
    float32: ClassVar[bool] = False

    @property
    def first(self) -> int:
        """The first slot of the search."""
        return max(self.slots // 4096, 1)

    @property
    def most(self) -> int:
        """Slots that the search chooses, and newest slots."""
        return self.slots // 20

    @property
    def bits(self) -> int:
        """Bits of a slot's code."""
        return code_bits(self.parts, self.count)

    @property
    def name(self) -> str:
        return f"{self.most} of {self.slots} keys by {self.bits} bits"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.slots * self.bits // 8

    @property
    def options(self) -> dict[str, Any]:
        return {"first": self.first, "capacity": self.most, "room": self.most}

    def draw(self, key: Array) -> dict[str, Any]:
        keys, shape = jax.random.split(key, 3), (self.parts, self.count, self.dim // self.parts)
        code = jax.random.randint(keys[0], (*self.rows, self.slots), 0, 1 << self.bits, jnp.int32)
        return {
            "query": normal(keys[1], *self.rows, GROUP, self.dim),
            "centroids": normal(keys[2], *self.rows, *shape, dtype=jnp.float32),
            "ids": bit_codes.pack(code, self.bits),
            "stop": jnp.full((1,), self.slots - self.most, jnp.int32),
            "length": jnp.full((1,), self.slots, jnp.int32),
            "wanted": jnp.full((1,), self.most, jnp.int32),
        }

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots), count=8)

    def defined(self, result: Any) -> Any:  # which of the best slots are at the cut depends on how sums round
        best = jnp.arange(result[0].shape[2]) - self.first
        return jnp.where((best >= 0) & (best < self.most), 0, result[0]), result[1]


SHAPES = (Sizes(),)
