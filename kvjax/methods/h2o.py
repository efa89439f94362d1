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

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.families import StepEviction
from kvjax.method import Prompt, Step
from kvjax.slots import check_budget
from kvjax.typing import is_concrete, pytree


@pytree
class H2O(StepEviction):
    """Heavy hitters and recent tokens, evicted online; see the module docstring."""

    num_recent: int | Array | None = None  # newest tokens, safe from eviction, traced; None = half of a concrete budget

    PAPER: ClassVar[str] = "arXiv:2306.14048"

    observes_prompt = True

    def __post_init__(self) -> None:
        if self.num_recent is None and is_concrete(self.budget):
            object.__setattr__(self, "num_recent", max(1, int(self.budget) // 2))
        recent = self.num_recent if is_concrete(self.num_recent) else 1
        if recent < 1:
            raise ValueError(f"H2O: num_recent must be at least 1 token, got {recent}")
        check_budget(self, recent + 1, f"num_recent={recent} and one heavy hitter")

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Array]:
        newest = cache.position.max(axis=(1, 2))[:, None, None]
        recent = cache.position > newest - self.num_recent
        return self.keep_best(cache, jnp.where(recent, jnp.inf, prompt.mass), room, carry=prompt.mass)

    def update(self, cache: LayerCache, aux: Array, step: Step, mass: Array | None) -> tuple[LayerCache, Array]:
        return cache.evict(aux, gain=mass, budget=self.budget, recent=self.num_recent)
