"""The shapes at which `coded_product` is timed: the largest product of an 8B layer, in 8 and in 4 bits."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.coded_matrix import GROUP, CodedMatrix
from pallas_kernels.formats.shapes import Shape, normal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product(Shape):
    """A matrix and some vectors.

    Attributes:
        bits: 8 with a scale for each row, or 4 with a scale and a minimum for each group.
        vectors: how many.
        count: rows N of the matrix.
        width: numbers K of a row.
    """

    bits: int = 8
    vectors: int = 1
    count: int = 28672
    width: int = 4096
    chained: ClassVar[str | None] = "x"
    float32: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"{self.bits} bits, {self.vectors} vector{'s' * (self.vectors > 1)}"

    @property
    def bytes_read(self) -> int:
        if self.bits == 8:
            return self.count * (self.width + 4)
        return self.count * (self.width // 2 + 4 * (self.width // GROUP))

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def draw(self, key: Array) -> dict[str, Any]:
        first, second, third = jax.random.split(key, 3)
        x = normal(first, self.vectors, self.width)
        if self.bits == 8:
            codes = jax.random.randint(second, (self.count, self.width), -127, 128, jnp.int8)
            return {"x": x, "matrix": CodedMatrix(codes=codes, scales=jnp.full((self.count, 1), 1e-3, jnp.float32))}
        codes = jax.random.bits(second, (self.count, self.width // 2), jnp.uint8)
        scales = jax.random.uniform(third, (self.count, self.width // GROUP), jnp.float32, 0.005, 0.01).astype(
            jnp.float16
        )
        return {"x": x, "matrix": CodedMatrix(codes=codes, scales=scales, minima=-8 * scales)}

    def tiny(self) -> Self:
        return dataclasses.replace(self, count=40, width=128)


SHAPES = tuple(Product(bits=bits, vectors=vectors) for bits in (8, 4) for vectors in (1, 16))
