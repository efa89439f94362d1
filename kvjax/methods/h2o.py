"""H2O: keep the tokens that have received the most attention so far, and the newest; evict one token per step.

Stored per KV head: ``budget`` tokens, and for each token the attention probability that it has received from all queries so
far.

Score of token i for KV head h, summed over every query t (of prompt and decoding) and the group's query heads::

    A[h, i] = sum over t, g of softmax_t,g[i]

The ``num_recent`` newest tokens are safe; the other tokens with the highest A are the heavy hitters. Once the cache is full,
every new token evicts the token with the lowest A outside the recent window. Prompt attention is dense and exact.

**Source**: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
(arXiv:2306.14048, algorithm 1); FMInference/H2O ac75c2a.

**Departures**: the released code evicts per query head, and assumes that there are as many KV heads. Here A is summed over
the group, and each KV head keeps one set. Tokens keep their true positions, as in the released "real drop" path. Scores are
not normalised by age, so early tokens are favoured, as published.
"""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.cache.divided import whole
from kvjax.protocol.families import StepEviction
from kvjax.protocol.fields import clamped, is_traced, number
from kvjax.protocol.method import Prompt, Step
from kvjax.protocol.slots import Reads, check_budget
from kvjax.protocol.typing import pytree, traced


@pytree
class H2O(StepEviction):
    """Heavy hitters and recent tokens, with eviction in every step; see the module docstring."""

    num_recent: int | Array = traced("newest tokens, never evicted; None = half the budget", default=None, least=1)

    PAPER: ClassVar[str] = "arXiv:2306.14048"

    reads = Reads(mass=True)
    slot_block = 1

    def check(self) -> None:
        budget, recent = number(self.budget), number(self.num_recent)
        if self.num_recent is None and budget is not None:
            recent = max(1, budget // 2)
            object.__setattr__(self, "num_recent", recent)
        least = 2 if recent is None else recent + 1
        check_budget(self, least, f"num_recent={least - 1} and one heavy hitter")
        if budget is None and self.num_recent is None and is_traced(self.budget):
            object.__setattr__(self, "num_recent", self.budget // 2)
        object.__setattr__(self, "num_recent", clamped(self.num_recent, 1, self.budget - 1))

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Array | None]:
        position, mass = whole(cache.position, cache), whole(prompt.mass, cache)
        recent = position > position.max(axis=(1, 2))[:, None, None] - self.num_recent
        return self.keep_best(cache, jnp.where(recent, jnp.inf, mass), room, carry=mass)

    def update(self, cache: LayerCache, aux: Array, step: Step, mass: Array | None) -> tuple[LayerCache, Array | None]:
        return cache.evict(aux, gain=mass, budget=self.budget, recent=self.num_recent)
