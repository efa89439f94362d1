"""The shape at which `packed_score` is timed: MosaicKV's means of blocks at 128K tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, CONTEXT, GROUP, Shape, few, normal, orthogonal, packed, small
from pallas_kernels.query.project_query import project_query


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """Means of blocks of 8 tokens, with a quarter of their channels.

    Attributes:
        slots: tokens of a row.
        segments: bases of a head.
    """

    slots: int = CONTEXT
    segments: int = 2
    chained: ClassVar[str | None] = "parts"
    tolerance: ClassVar[float] = 1e-4
    float32: ClassVar[bool] = False

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.slots // 8

    @property
    def name(self) -> str:
        return f"{self.blocks} blocks"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.blocks * (self.dim // 4 * BYTES + self.dim // 8)

    @property
    def options(self) -> dict[str, Any]:
        return {"span": self.blocks // self.segments}

    def draw(self, key: Array) -> dict[str, Any]:
        keys = jax.random.split(key, 3)
        query = normal(keys[0], *self.rows, GROUP, self.dim)
        basis = orthogonal(keys[1], *self.rows, self.segments, dim=self.dim)
        values, bitmap = packed(keys[2], (*self.rows, self.blocks), self.dim, self.dim // 4)
        return {
            "parts": project_query(query, basis, dtype=jnp.bfloat16, implementation="xla"),
            "values": values,
            "bitmap": bitmap,
            "count": jnp.full((1,), self.blocks, jnp.int32),
            "last": jnp.full((1,), self.segments - 1, jnp.int32),
        }

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots))


SHAPES = (Sizes(),)
