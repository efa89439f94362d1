"""The shapes at which `dense_attention` is timed: chunks of a prompt over a cache that keeps a bounded number of tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, GROUP, Shape, normal, positions, query_key_value, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """A chunk of a prompt, whose own tokens are the last in the cache.

    Attributes:
        tokens: queries T.
        slots: tokens of the cache S, the chunk included.
        window: tokens that a query sees, itself included; None: all before it.
    """

    tokens: int
    slots: int
    window: int | None = None

    @property
    def name(self) -> str:
        seen = "" if self.window is None else f", a window of {self.window}"
        return f"{self.tokens} queries, {self.slots} tokens{seen}"

    @property
    def bytes_read(self) -> int:
        return 2 * self.heads * self.slots * self.dim * BYTES

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def draw(self, key: Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        _, keys, values = query_key_value(second, self, self.slots)
        asked = self.slots - self.tokens + jnp.arange(self.tokens, dtype=jnp.int32)[None]
        return {
            "query": normal(first, *self.rows, GROUP, self.tokens, self.dim),
            "key": keys,
            "value": values,
            "query_position": asked,
            "key_position": positions(self.rows, self.slots),
            "query_first": None if self.window is None else asked - (self.window - 1),
        }

    def tiny(self) -> Self:
        window = None if self.window is None else self.window // 64
        return small(self, tokens=self.tokens // 64 + 1, slots=self.slots // 64, window=window)


SHAPES = (Sizes(tokens=128, slots=2176), Sizes(tokens=512, slots=4607, window=4096))
