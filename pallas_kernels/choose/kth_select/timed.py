"""The shapes at which `kth_select` is timed: budgets of retrieval at up to 1M slots."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import CONTEXT, Shape, few, normal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """Scores of slots.

    Attributes:
        slots: scores of a head.
        best: the budget, and the capacity of the list.
    """

    slots: int = CONTEXT
    best: int = 2048
    chained: ClassVar[str | None] = "score"

    @property
    def name(self) -> str:
        return f"{self.best} of [{self.heads}, {self.slots}]"

    @property
    def bytes_read(self) -> int:
        return 4 * self.heads * self.slots

    @property
    def options(self) -> dict[str, Any]:
        return {"budget": self.best, "capacity": self.best}

    def draw(self, key: Array) -> dict[str, Any]:
        return {"score": normal(key, *self.rows, self.slots, dtype=jnp.float32)}

    def tiny(self) -> Self:
        return dataclasses.replace(self, heads=min(self.heads, 2), slots=few(self.slots), best=few(self.best))


SHAPES = (Sizes(), Sizes(slots=8 * CONTEXT), Sizes(heads=1), Sizes(slots=8192, best=128))
