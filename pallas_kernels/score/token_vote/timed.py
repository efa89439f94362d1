"""The shapes at which `token_vote` is timed: a decode step of TokenSelect at up to 1M tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, CONTEXT, Shape, few, query_key_value, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """Keys of a cache.

    Attributes:
        slots: tokens of a row.
    """

    slots: int = CONTEXT
    tolerance: ClassVar[float] = 1e-3

    @property
    def name(self) -> str:
        return f"{self.slots} tokens"

    @property
    def bytes_read(self) -> int:
        return self.heads * self.slots * self.dim * BYTES

    @property
    def options(self) -> dict[str, Any]:
        return {"start": 0}

    def draw(self, key: Array) -> dict[str, Any]:
        query, keys, _ = query_key_value(key, self, self.slots)
        return {"query": query.astype(jnp.float32), "key": keys, "stop": jnp.full((1,), self.slots, jnp.int32)}

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots))


SHAPES = (Sizes(), Sizes(slots=8 * CONTEXT))
