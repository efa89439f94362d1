"""H2O: keep the tokens that have gathered most attention so far, and the newest; evict one token per step.

Stored per KV head: ``budget`` tokens, and for each the attention probability it has received from all queries so far.

Score of token i for KV head h, accumulated over every query t (prompt and decode) and the group's query heads::

    A[h, i] = sum over t, g of softmax_t,g[i]

The ``num_recent`` newest tokens are safe; of the others the highest A are the heavy hitters. Once the cache is full every
new token evicts the lightest token outside the recent window. Prompt attention is dense and exact.

**Source**: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
(arXiv:2306.14048, algorithm 1); FMInference/H2O ac75c2a.

**Departures**: the released code evicts per query head and assumes as many KV heads; here A is summed over the group and
one set is kept per KV head. True positions (the released "real drop" path), no normalisation by age (early tokens are
favoured, as published).
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.families import check_budget, count_all
from kvjax.method import LayerMethod, Prompt, SlotMethod, Step
from kvjax.selection import top_slots
from kvjax.typing import is_concrete, pytree, static


@pytree
class H2O(SlotMethod):
    """Heavy hitters and recent tokens, evicted online; see the module docstring."""

    budget: int | Array = 1024  # tokens kept per KV head, traced, at most `capacity`
    num_recent: int | Array | None = None  # newest tokens, safe from eviction, traced; None = half of a concrete budget
    capacity: int | None = static(None)  # allocated slots; None = budget

    PAPER: ClassVar[str] = "arXiv:2306.14048"

    observes_attention = True
    keeps = "`budget` tokens per KV head"
    evicts = True
    moves_slots = True

    def __post_init__(self) -> None:
        if self.num_recent is None and is_concrete(self.budget):
            object.__setattr__(self, "num_recent", max(1, int(self.budget) // 2))
        recent = self.num_recent if is_concrete(self.num_recent) else 1
        if recent < 1:
            raise ValueError(f"H2O: num_recent must be at least 1 token, got {recent}")
        check_budget(self, recent + 1, f"num_recent={recent} and one heavy hitter")

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Array]:
        score = jnp.where(self._recent(cache), jnp.inf, prompt.mass)
        slots, keep = top_slots(score, cache.valid, self.budget, self.capacity)
        mass = jnp.where(keep, jnp.take_along_axis(prompt.mass, slots, axis=2), 0)
        # A prompt shorter than the budget leaves more than one slot free.
        spare = min(self.bounded_slots(), cache.num_slots + room) - slots.shape[2]
        return cache.compact(slots, keep, spare), jnp.pad(mass, ((0, 0), (0, 0), (0, spare)))

    def select(self, cache: LayerCache, aux: Array, step: Step) -> None:
        return None

    def update(self, cache: LayerCache, aux: Array, step: Step, mass: Array | None) -> tuple[LayerCache, Array]:
        return cache.evict(aux, gain=mass, budget=self.budget, recent=self.num_recent)

    def count(self, cache: LayerCache, aux: Array, shared: Any) -> tuple[Array, Array]:
        stored, _ = count_all(cache)
        return stored, stored.astype(jnp.float32) * aux.dtype.itemsize

    def counters(self, aux: Any, shared: Any) -> dict[str, Array]:
        return {}

    def bounded_slots(self) -> int:
        return self.capacity + 1  # the new token is attended to before one is evicted

    def max_tokens(self, in_prompt: bool) -> int | None:
        return None if in_prompt else 1

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return self

    def _recent(self, cache: LayerCache) -> Array:
        """Slots of the ``num_recent`` newest tokens of each row, bool [B, H, S]."""
        newest = cache.position.max(axis=(1, 2))[:, None, None]
        return cache.position > newest - self.num_recent
