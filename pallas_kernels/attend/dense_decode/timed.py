"""The shapes at which `dense_decode` is timed: full attention at up to 512K tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.quantised import quantise
from pallas_kernels.formats.shapes import BYTES, CONTEXT, Shape, few, positions, query_key_value, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """A decode step that attends to all tokens.

    Attributes:
        batch: rows B.
        slots: tokens of a row.
        kind: format of the codes of 8 bits of keys and values; None for bfloat16.
    """

    batch: int = 1
    slots: int = CONTEXT
    kind: str | None = None

    @property
    def name(self) -> str:
        return f"{self.slots} tokens{'' if self.kind is None else f' in {self.kind}'}, {self.batch} rows"

    @property
    def bytes_read(self) -> int:
        row = self.dim * BYTES if self.kind is None else self.dim + 2  # codes of a vector and their scale
        return 2 * self.batch * self.heads * self.slots * row

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale}

    def draw(self, key: Array) -> dict[str, Any]:
        query, keys, values = query_key_value(key, self, self.slots, self.batch)
        if self.kind is not None:
            keys, values = quantise(keys, self.kind), quantise(values, self.kind)
        position = positions((self.batch, self.heads), self.slots)
        limit = jnp.full((self.batch,), self.slots, jnp.int32)
        return {"query": query, "key": keys, "value": values, "position": position, "limit": limit}

    def tiny(self) -> Self:
        return small(self, slots=few(self.slots))


SHAPES = (
    Sizes(),
    Sizes(batch=8),
    Sizes(slots=4 * CONTEXT),
    Sizes(slots=1280),
    Sizes(kind="int8"),
    Sizes(batch=8, kind="int8"),
    Sizes(kind="float8_e4m3fn"),
)
