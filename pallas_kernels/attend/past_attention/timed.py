"""The shape at which `past_attention` is timed: a piece of a prefill over 128K tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, CONTEXT, GROUP, Shape, few, normal, query_key_value, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """A piece of a prompt, whose queries all see the whole cache.

    Attributes:
        tokens: queries T.
        before: tokens of the cache.
    """

    tokens: int = 8192
    before: int = CONTEXT

    @property
    def name(self) -> str:
        return f"{self.tokens} queries over {self.before} tokens"

    @property
    def bytes_read(self) -> int:
        return 2 * self.heads * self.before * self.dim * BYTES

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def draw(self, key: Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        _, keys, values = query_key_value(second, self, self.before)
        query = normal(first, *self.rows, GROUP, self.tokens, self.dim)
        return {"query": query, "key": keys, "value": values, "count": jnp.full((1,), self.before, jnp.int32)}

    def tiny(self) -> Self:
        return small(self, tokens=self.tokens // 64, before=few(self.before))


SHAPES = (Sizes(),)
