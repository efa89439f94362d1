"""The shape at which `window_score` is timed: SnapKV's window at the end of a prompt of 128K tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, CONTEXT, GROUP, Shape, few, normal, positions, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """The last queries of a prompt.

    Attributes:
        slots: tokens of the prompt.
        window: queries.
    """

    slots: int = CONTEXT
    window: int = 32

    @property
    def name(self) -> str:
        return f"{self.window} queries over {self.slots} tokens"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.slots * self.dim * BYTES

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def draw(self, key: Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        return {
            "query": normal(first, *self.rows, GROUP, self.window, self.dim),
            "key": normal(second, *self.rows, self.slots, self.dim),
            "query_position": jnp.arange(self.slots - self.window, self.slots, dtype=jnp.int32)[None],
            "key_position": positions(self.rows, self.slots),
        }

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots), window=8)


SHAPES = (Sizes(),)
