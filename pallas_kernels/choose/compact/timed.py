"""The shape at which `compact` is timed: a threshold that keeps 2048 of 128K slots."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
from jax import Array

from pallas_kernels.formats.shapes import CONTEXT, Shape, few, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """A mask of slots, of which nine tenths of the capacity are true.

    Attributes:
        slots: slots of a head.
        most: capacity of the list.
    """

    slots: int = CONTEXT
    most: int = 2048
    chained: ClassVar[str | None] = None

    @property
    def name(self) -> str:
        return f"{self.most} of [{self.heads}, {self.slots}]"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.slots

    @property
    def options(self) -> dict[str, Any]:
        return {"capacity": self.most}

    def draw(self, key: Array) -> dict[str, Any]:
        return {"mask": jax.random.uniform(key, (*self.rows, self.slots)) < 0.9 * self.most / self.slots}

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots), most=few(self.most))


SHAPES = (Sizes(),)
