"""The shapes at which `gather_attention` is timed: lists of a retrieval method at 128K tokens."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.quantised import quantise
from pallas_kernels.formats.shapes import BYTES, CONTEXT, Shape, few, lists, positions, query_key_value, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """A decode step that attends to lists of slots or pages.

    Attributes:
        batch: rows B.
        slots: tokens of a row.
        entries: slots or pages of a list.
        page_size: slots per page.
        shared: whether all heads share a list.
        rotate: whether keys are rotated as they are read.
        kind: format of the codes of 8 bits of keys and values; None for bfloat16.
    """

    batch: int = 1
    slots: int = CONTEXT
    entries: int = 2048
    page_size: int = 1
    shared: bool = False
    rotate: bool = False
    kind: str | None = None

    @property
    def name(self) -> str:
        if self.kind is not None:
            return f"{self.entries} of {self.slots} tokens in {self.kind} per KV head"
        rows = f"{self.batch} row" if self.batch == 1 else f"{self.batch} rows"
        whose = "for all heads" if self.shared else "per KV head"
        if self.page_size > 1:
            return f"{self.entries} pages of {self.page_size} {whose} of {self.slots} tokens, {rows}"
        rotated = ", rotated on read" if self.rotate else ""
        return f"{self.entries} of {self.slots} tokens {whose}{rotated}, {rows}"

    @property
    def bytes_read(self) -> int:
        row = self.dim * BYTES if self.kind is None else self.dim + 2  # codes of a vector and their scale
        return 2 * self.batch * self.heads * self.entries * self.page_size * row

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale, "page_size": self.page_size}

    def draw(self, key: Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        query, keys, values = query_key_value(first, self, self.slots, self.batch)
        if self.kind is not None:
            keys, values = quantise(keys, self.kind), quantise(values, self.kind)
        heads = (self.batch, 1 if self.shared else self.heads)
        slots = lists(second, heads, self.slots // self.page_size, self.entries)
        arrays = {"query": query, "key": keys, "value": values, "slots": slots, "mask": jnp.ones(slots.shape, bool)}
        if self.page_size > 1:
            arrays["position"] = positions((self.batch, self.heads), self.slots)
        if self.rotate:
            arrays["place"] = positions(heads, self.entries)
            arrays["inv_freq"] = jnp.exp(-jnp.arange(self.dim // 2, dtype=jnp.float32))
        return arrays

    def tiny(self) -> Self:
        entries = max(1, few(self.entries * self.page_size) // self.page_size)
        return small(self, slots=few(self.slots), entries=entries)


SHAPES = (
    Sizes(),
    Sizes(batch=8),
    Sizes(entries=128, page_size=16),
    Sizes(entries=64, page_size=32, shared=True),
    Sizes(entries=2688, shared=True, rotate=True),
    Sizes(kind="int8"),
)
