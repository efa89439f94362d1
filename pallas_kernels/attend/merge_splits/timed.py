"""The shape at which `merge_splits` is timed: the parts of a decode step."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import GROUP, Shape, normal, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """Partial attention of a decode step.

    Attributes:
        parts: partial outputs N of each head.
    """

    parts: int = 32
    chained: ClassVar[str | None] = "out"
    tolerance: ClassVar[float] = 1e-4

    @property
    def name(self) -> str:
        return f"{self.parts} parts, {self.heads} lists"

    @property
    def bytes_read(self) -> int:
        return 4 * self.heads * self.parts * GROUP * (self.dim + 1)

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def draw(self, key: Array) -> dict[str, Any]:
        shape, (first, second) = (self.heads, self.parts, GROUP), jax.random.split(key)
        out = normal(first, *shape, self.dim, dtype=jnp.float32)
        return {"out": out, "lse": normal(second, *shape, dtype=jnp.float32)}

    def tiny(self) -> Self:
        return small(self)


SHAPES = (Sizes(),)
