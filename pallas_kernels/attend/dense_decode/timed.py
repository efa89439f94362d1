"""The shapes at which `dense_decode` is timed: full attention at up to 512K tokens, with one query per head or a few."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.quantised import quantise
from pallas_kernels.formats.shapes import BYTES, CONTEXT, GROUP, Shape, few, normal, positions, query_key_value, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """A decode step that attends to all tokens.

    Attributes:
        batch: rows B.
        slots: tokens of a row.
        kind: format of the codes of 8 bits of keys and values; None for bfloat16.
        queries: the newest tokens of a row, which attend at once; None for a decode step's one.
    """

    batch: int = 1
    slots: int = CONTEXT
    kind: str | None = None
    queries: int | None = None

    @property
    def name(self) -> str:
        asked = "" if self.queries is None else f", {self.queries} queries"
        return f"{self.slots} tokens{'' if self.kind is None else f' in {self.kind}'}, {self.batch} rows{asked}"

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
        cache = {"key": keys, "value": values, "position": position, "limit": limit}
        if self.queries is None:
            return {"query": query, **cache}
        query = normal(jax.random.fold_in(key, 0), self.batch, self.heads, GROUP, self.queries, self.dim)
        newest = jnp.arange(self.slots - self.queries, self.slots, dtype=jnp.int32)
        return {"query": query, **cache, "query_position": jnp.broadcast_to(newest, (self.batch, self.queries))}

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
    Sizes(batch=8, slots=CONTEXT // 4),
    Sizes(queries=6),
    Sizes(batch=8, slots=CONTEXT // 4, queries=6),
    Sizes(kind="int8", queries=6),
)
