"""The shape at which `page_logits` is timed: ShadowKV's chunks of 8 tokens at 128K tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, CONTEXT, Shape, query_key_value, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """Landmarks of all chunks.

    Attributes:
        pages: chunks of a head.
    """

    pages: int = CONTEXT // 8

    @property
    def name(self) -> str:
        return f"{self.pages} pages per KV head"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.pages * self.dim * BYTES

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def draw(self, key: Array) -> dict[str, Any]:
        query, vector, _ = query_key_value(key, self, self.pages)
        return {"query": query, "vector": vector, "limit": jnp.full((1,), self.pages, jnp.int32)}

    def tiny(self) -> Self:
        return small(self, pages=self.pages // 512)

    def defined(self, result: Any) -> Any:  # implementations divide the pages into different parts
        return result[0], jax.nn.logsumexp(result[1], axis=2)


SHAPES = (Sizes(),)
