"""The shape at which `dissimilarity` is timed: a cache of KeyDiff with 1,024 tokens and the newest token."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from jax import Array

from pallas_kernels.formats.shapes import BYTES, Shape, normal, positions, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """A row of a cache.

    Attributes:
        slots: tokens of the row.
    """

    slots: int = 1025
    chained: ClassVar[str | None] = "key"

    @property
    def name(self) -> str:
        return f"{self.slots} tokens, 1 row"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.slots * (self.dim * BYTES + 4)

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def draw(self, key: Array) -> dict[str, Any]:
        return {"key": normal(key, *self.rows, self.slots, self.dim), "position": positions(self.rows, self.slots)}

    def tiny(self) -> Self:
        return small(self, slots=17)


SHAPES = (Sizes(),)
