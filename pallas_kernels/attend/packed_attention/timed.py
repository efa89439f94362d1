"""The shape at which `packed_attention` is timed: MosaicKV with 10 % of its blocks at 128K tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import (
    BYTES,
    CONTEXT,
    GROUP,
    Shape,
    few,
    lists,
    normal,
    orthogonal,
    packed,
    positions,
    small,
)
from pallas_kernels.query.project_query import project_query


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """Blocks of 8 tokens, with a quarter of their channels, and 64 whole tokens.

    Attributes:
        slots: tokens of a row.
        segments: bases of a head.
        recent: tokens that are not packed.
    """

    slots: int = CONTEXT
    segments: int = 2
    recent: int = 64
    chained: ClassVar[str | None] = "parts"
    float32: ClassVar[bool] = False

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return self.slots // 8

    @property
    def chosen(self) -> int:
        """Blocks of a list."""
        return math.ceil(self.blocks / 10)

    @property
    def name(self) -> str:
        return f"{self.chosen} of {self.blocks} blocks of 8"

    @property
    def bytes_read(self) -> int:
        row = self.dim // 4 * BYTES + self.dim // 8
        return 2 * self.heads * (self.chosen * 8 * row + self.recent * self.dim * BYTES)

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale, "granule": 8, "span": self.blocks // self.segments}

    def draw(self, key: Array) -> dict[str, Any]:
        keys, rank = jax.random.split(key, 8), self.dim // 4
        query = normal(keys[0], *self.rows, GROUP, self.dim)
        basis = orthogonal(keys[1], *self.rows, self.segments, dim=self.dim)
        recent = (normal(x, *self.rows, self.recent, self.dim) for x in keys[2:4])
        return {
            "parts": project_query(query, basis, dtype=jnp.bfloat16, implementation="xla"),
            "query": query,
            "key": packed(keys[4], (*self.rows, self.slots), self.dim, rank),
            "value": packed(keys[5], (*self.rows, self.slots), self.dim, rank),
            "basis": orthogonal(keys[6], *self.rows, self.segments, dim=self.dim),
            "blocks": lists(keys[7], self.rows, self.blocks, self.chosen),
            "count": jnp.full(self.rows, self.chosen, jnp.int32),
            "last": jnp.full((1,), self.segments - 1, jnp.int32),
            "recent": (*recent, positions(self.rows, self.recent)),
        }

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots))


SHAPES = (Sizes(),)
