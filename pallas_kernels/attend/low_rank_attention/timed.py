"""The shape at which `low_rank_attention` is timed: ShadowKV's attention at 128K tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, CONTEXT, GROUP, Shape, few, lists, normal, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """Listed chunks of a cache whose keys have a low rank.

    Attributes:
        slots: tokens of a row.
        rank: rank of the keys.
        tokens: tokens of the listed chunks of a head.
        chunk: tokens per chunk.
    """

    slots: int = CONTEXT
    rank: int = 160
    tokens: int = 2048
    chunk: int = 8

    @property
    def chosen(self) -> int:
        """Chunks of a list."""
        return self.tokens // self.chunk

    @property
    def name(self) -> str:
        return f"{self.chosen} pages of {self.chunk} per KV head of {self.slots} tokens, rank {self.rank}"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.chosen * self.chunk * (self.rank + self.dim) * BYTES

    @property
    def options(self) -> dict[str, Any]:
        return {"page_size": self.chunk, "scale": self.scale}

    def draw(self, key: Array) -> dict[str, Any]:
        keys = jax.random.split(key, 5)
        pages = lists(keys[4], self.rows, self.slots // self.chunk, self.chosen)
        return {
            "query": normal(keys[0], *self.rows, GROUP, self.dim),
            "left": normal(keys[1], 1, self.slots, self.rank),
            "right": normal(keys[2], *self.rows, self.rank, self.dim) / math.sqrt(self.rank),
            "value": normal(keys[3], *self.rows, self.slots, self.dim),
            "pages": pages,
            "mask": jnp.ones(pages.shape, bool),
            "inv_freq": jnp.exp(-jnp.arange(self.dim // 2, dtype=jnp.float32)),
        }

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots), rank=16, tokens=few(self.tokens))


SHAPES = (Sizes(),)
