"""The shapes at which `sparse_attention` is timed: the last 8192 tokens of a prompt of up to 512K tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.shapes import BYTES, CONTEXT, GROUP, Shape, few, lists, normal, query_key_value, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """A piece of a prompt that attends to blocks near its queries, or scattered over the whole prompt, and to columns.

    Attributes:
        slots: tokens of the prompt.
        tokens: queries T.
        near: blocks for each block of queries, at most.
        scattered: whether the blocks are scattered.
        most: columns.
        block: tokens per block.
    """

    slots: int = CONTEXT
    tokens: int = 8192
    near: int = 96
    scattered: bool = False
    most: int = 1000
    block: int = 64

    @property
    def before(self) -> int:
        """Blocks in front of the queries."""
        return (self.slots - self.tokens) // self.block

    @property
    def far(self) -> int:
        """Blocks for each block of queries."""
        return min(self.near, self.before)

    @property
    def name(self) -> str:
        kind = "scattered" if self.scattered else "near"
        return f"{self.tokens} queries, {self.far} {kind} blocks and {self.most} columns of {self.slots} tokens"

    @property
    def bytes_read(self) -> int:
        return 2 * self.heads * self.slots * self.dim * BYTES

    @property
    def options(self) -> dict[str, Any]:
        return {"block": self.block, "scale": self.scale}

    def draw(self, key: Array) -> dict[str, Any]:
        keys, heads = jax.random.split(key, 4), (*self.rows, GROUP)
        _, cache_key, cache_value = query_key_value(keys[0], self, self.slots)
        first = jnp.zeros((*heads, self.tokens // self.block), jnp.int32)
        return {
            "query": normal(keys[1], *heads, self.tokens, self.dim),
            "key": cache_key,
            "value": cache_value,
            "distances": 1 + lists(keys[2], heads, self.before if self.scattered else self.far, self.far),
            "first": first,
            "count": first + self.far,
            "columns": lists(keys[3], heads, self.slots, self.most),
            "num_columns": jnp.full(heads, self.most, jnp.int32),
            "start": jnp.full((), self.slots - self.tokens, jnp.int32),
            "length": jnp.full((1,), self.tokens, jnp.int32),
        }

    def tiny(self) -> Self:
        return small(self, slots=max(4 * self.block, few(self.slots)), tokens=2 * self.block, most=16)


SHAPES = (Sizes(), Sizes(slots=4 * CONTEXT), Sizes(near=512, scattered=True))
