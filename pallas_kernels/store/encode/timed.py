"""The shape at which `encode` is timed: ParisKV's codes of a prompt of 128K tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, CONTEXT, Shape, few, normal, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """Keys of a prompt.

    Attributes:
        slots: tokens of the prompt.
    """

    slots: int = CONTEXT
    chained: ClassVar[str | None] = None

    @property
    def name(self) -> str:
        return f"{self.slots} keys"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.slots * self.dim * BYTES

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def draw(self, key: Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        return {
            "key": normal(first, *self.rows, self.slots, self.dim),
            "valid": jnp.ones((*self.rows, self.slots), bool),
            "signs": jax.random.rademacher(second, (self.dim,), jnp.float32),
        }

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots))

    def defined(self, result: Any) -> Any:  # at the edge of a level, rounding decides on which side a channel falls
        return result[0], *(x.astype(jnp.float32) for x in result[1:])


SHAPES = (Sizes(),)
