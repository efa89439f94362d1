"""The shapes at which `bucket_score` is timed: SOCKET's search at 128K tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, CONTEXT, GROUP, Shape, few, normal, positions, small
from pallas_kernels.formats.sign_codes import BLOCK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """Buckets of all keys.

    Attributes:
        batch: rows B.
        slots: tokens of a row.
        tables: hash tables.
        bits: planes of a table.
    """

    batch: int = 1
    slots: int = CONTEXT
    tables: int = 60
    bits: int = 8
    tolerance: ClassVar[float] = 1e-5

    @property
    def name(self) -> str:
        return f"{self.tables} tables of {self.slots} keys, {self.batch} rows"

    @property
    def bytes_read(self) -> int:
        searched = self.slots - 2 * (self.slots // 16)
        return self.batch * self.heads * searched * (self.tables + BYTES + 4)  # ids, norms and positions

    @property
    def options(self) -> dict[str, Any]:
        return {"first": self.slots // 16, "num_local": self.slots // 16}

    def draw(self, key: Array) -> dict[str, Any]:
        keys, heads = jax.random.split(key, 4), (self.batch, self.heads)
        shape = (*heads, -(-self.slots // BLOCK), self.tables * BLOCK)
        return {
            "query": normal(keys[0], *heads, GROUP, self.dim),
            "planes": normal(keys[1], self.tables, self.bits, self.dim, dtype=jnp.float32),
            "temperature": jnp.float32(0.3),
            "ids": jax.random.randint(keys[2], shape, 0, 1 << self.bits, jnp.int32).astype(jnp.uint8),
            "norm": jnp.abs(normal(keys[3], *heads, self.slots)),
            "position": positions(heads, self.slots),
            "cursor": jnp.full((self.batch,), self.slots, jnp.int32),
        }

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots), tables=6, bits=3)


SHAPES = (Sizes(), Sizes(batch=8))
