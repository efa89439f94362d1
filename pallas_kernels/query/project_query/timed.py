"""The shape at which `project_query` is timed: a decode step of MosaicKV."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import GROUP, Shape, normal, orthogonal, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """The bases of a cache.

    Attributes:
        segments: bases of a head.
    """

    segments: int = 2
    float32: ClassVar[bool] = False

    @property
    def name(self) -> str:
        return f"{self.segments} segments"

    @property
    def bytes_read(self) -> int:
        return 4 * self.heads * self.segments * self.dim * self.dim

    @property
    def options(self) -> dict[str, Any]:
        return {"dtype": jnp.bfloat16}

    def draw(self, key: Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        basis = orthogonal(second, *self.rows, self.segments, dim=self.dim)
        return {"query": normal(first, *self.rows, GROUP, self.dim), "basis": basis}

    def tiny(self) -> Self:
        return small(self)

    def defined(self, result: Any) -> Any:  # the sum of the terms of each query
        return result.astype(jnp.float32).sum(axis=-2)


SHAPES = (Sizes(),)
