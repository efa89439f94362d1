"""KeyDiff: keep the keys that differ most from their mean direction; no query and no attention map is needed.

Stored per KV head: ``budget`` tokens. The prompt is processed in blocks of ``block`` tokens: a block is appended, attends
to everything stored, and the cache is cut back to the budget; so memory is bounded from the first token on. Decoding does
the same with blocks of one.

Score of token i, with k the rotated keys in the cache::

    s_i = - cos( mu, k_i ),    mu = mean over j of k_j / |k_j|

**Source**: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments" (arXiv:2504.15364).

**Departures**: none known in the block variant. No recent window is protected, so the newest token can be evicted at once
(as published). NVIDIA/kvpress runs another variant: one dense prefill, then the blocks' eviction order.
"""

from __future__ import annotations

from typing import Any, ClassVar

from jax import Array

from kvjax.cache import LayerCache
from kvjax.families import check_budget, count_all
from kvjax.method import LayerMethod, Prompt, SlotMethod, Step
from kvjax.selection import top_slots
from kvjax.typing import pytree, static
from pallas_kernels.dissimilarity import dissimilarity


@pytree
class KeyDiff(SlotMethod):
    """Bounded cache of mutually different keys; see the module docstring."""

    budget: int | Array = 1024  # tokens kept per KV head, traced, at most `capacity`
    capacity: int | None = static(None)  # allocated for them; None = budget
    block: int = static(128)  # prompt tokens processed between evictions

    PAPER: ClassVar[str] = "arXiv:2504.15364"

    keeps = "`budget` tokens per KV head"
    evicts = True
    moves_slots = True
    dense_prompt = False

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"KeyDiff: block must be at least 1 token, got {self.block}")
        check_budget(self, 1, "at least one key")

    def score(self, cache: LayerCache) -> Array:
        """Dissimilarity of every stored key from the mean direction: float32 [B, H, S]."""
        return dissimilarity(cache.key, cache.position)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        raise AssertionError("KeyDiff bounds its cache while the prompt runs; there is nothing left to compress")

    def select(self, cache: LayerCache, aux: None, step: Step) -> None:
        return None

    def update(self, cache: LayerCache, aux: None, step: Step, mass: Array | None) -> tuple[LayerCache, None]:
        score = self.score(cache)
        if step.position.shape[1] == 1:
            return cache.evict(score, budget=self.budget)[0], None
        slots, keep = top_slots(score, cache.valid, self.budget, self.capacity)
        return cache.compact(slots, keep, cache.num_slots - slots.shape[2]), None

    def count(self, cache: LayerCache, aux: None, shared: Any) -> tuple[Array, Array]:
        return count_all(cache)

    def counters(self, aux: Any, shared: Any) -> dict[str, Array]:
        return {}

    def bounded_slots(self) -> int:
        return self.capacity + self.block

    def max_tokens(self, in_prompt: bool) -> int:
        return self.block

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return self
