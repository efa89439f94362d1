"""The shape at which `sentence_cut` is timed: a decode step of SentenceKV with half of its slots."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
from jax import Array

from pallas_kernels.choose.sentence_cut import JOINS, Rules
from pallas_kernels.formats.shapes import Shape, normal, positions, small


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(Shape):
    """Sentences of 16 tokens.

    Attributes:
        slots: tokens of a row.
        size: tokens of a sentence.
        rules: the limits of the operation.
    """

    slots: int = 2112
    size: int = 16
    rules: Rules = Rules(sinks=32, recent=32, open_cap=256, whole=0)
    chained: ClassVar[str | None] = "score"

    @property
    def sentences(self) -> int:
        """Sentences of a row."""
        return self.slots // self.size

    @property
    def name(self) -> str:
        return f"{self.slots // 2} of {self.slots} slots, {self.sentences} sentences"

    @property
    def bytes_read(self) -> int:
        return 4 * self.heads * (2 * self.slots + self.sentences)

    @property
    def options(self) -> dict[str, Any]:
        return {"budget": self.slots // 2, "rules": self.rules}

    def draw(self, key: Array) -> dict[str, Any]:
        position = positions(self.rows, self.slots)
        return {
            "score": normal(key, *self.rows, self.sentences, dtype=jnp.float32),
            "sentence": position // self.size,
            "position": position,
            "count": jnp.full(self.rows, self.sentences, jnp.int32),
            "length": jnp.full(self.rows, 3, jnp.int32),
            "cursor": jnp.full((1,), self.slots, jnp.int32),
            "event": jnp.full((1,), JOINS, jnp.int32),
        }

    def tiny(self) -> Self:
        return small(self, slots=80, rules=Rules(sinks=4, recent=4, open_cap=8, whole=0))


SHAPES = (Sizes(),)
