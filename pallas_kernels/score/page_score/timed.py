"""The shapes at which `page_score` is timed: the bounds of Quest's pages."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, Shape, few, query_key_value, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """Bounds of the pages of a cache.

    Attributes:
        pages: pages of a head.
    """

    pages: int = 8192

    @property
    def name(self) -> str:
        return f"bounds of {self.pages} pages"

    @property
    def bytes_read(self) -> int:
        return 2 * self.heads * self.pages * self.dim * BYTES

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def draw(self, key: Array) -> dict[str, Any]:
        query, low, more = query_key_value(key, self, self.pages)
        return {"query": query, "low": low, "high": low + jnp.abs(more), "limit": jnp.full((1,), self.pages, jnp.int32)}

    def tiny(self) -> Self:
        return small(self, pages=few(self.pages))


SHAPES = (Sizes(), Sizes(pages=65536))
