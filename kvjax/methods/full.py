"""Full: exact attention over every token; the quality reference and the denominator of every claim.

Stored: keys (rotated at their position) and values of all tokens. Nothing is scored, nothing is dropped.

**Source**: Vaswani et al., "Attention Is All You Need" (arXiv:1706.03762), grouped-query form of arXiv:2305.13245.
**Departures**: none.
"""

from __future__ import annotations

from typing import ClassVar

from jax import Array

from kvjax.cache import LayerCache
from kvjax.families import count_all
from kvjax.method import LayerMethod, Prompt, SlotMethod
from kvjax.typing import pytree


@pytree
class Full(SlotMethod):
    """Keep and attend to everything; see the module docstring."""

    PAPER: ClassVar[str] = "arXiv:1706.03762"

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        return cache, None

    def select(self, cache: LayerCache, aux: None, query: Array) -> None:
        return None

    def update(self, cache: LayerCache, aux: None, position: Array, mass: Array | None) -> tuple[LayerCache, None]:
        return cache, None

    def count(self, cache: LayerCache, aux: None) -> tuple[Array, Array]:
        return count_all(cache)

    def bounded_slots(self) -> None:
        return None

    def max_tokens(self, in_prompt: bool) -> None:
        return None

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return self
