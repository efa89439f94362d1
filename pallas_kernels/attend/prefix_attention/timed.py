"""The shapes at which `prefix_attention` is timed: pieces of a prefill after up to 1M tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, CONTEXT, GROUP, Shape, few, normal, query_key_value, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """A piece of a prompt.

    Attributes:
        tokens: queries T.
        before: tokens of the cache in front of them.
    """

    tokens: int = 512
    before: int = CONTEXT

    @property
    def name(self) -> str:
        return f"{self.tokens} queries after {self.before} tokens"

    @property
    def bytes_read(self) -> int:
        return 2 * self.heads * (self.before + self.tokens) * self.dim * BYTES

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def draw(self, key: Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        _, keys, values = query_key_value(second, self, self.before + self.tokens)
        query = normal(first, *self.rows, GROUP, self.tokens, self.dim)
        start, length = jnp.full((), self.before, jnp.int32), jnp.full((1,), self.tokens, jnp.int32)
        return {"query": query, "key": keys, "value": values, "start": start, "length": length}

    def tiny(self) -> Self:
        return small(self, tokens=self.tokens // 64, before=few(self.before))


SHAPES = (Sizes(), Sizes(before=8 * CONTEXT), Sizes(tokens=8192))
