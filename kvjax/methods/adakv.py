"""AdaKV: as SnapKV, but the heads of a layer share one budget, so that a head with many important tokens keeps more.

Stored after the prompt: H * ``budget`` slots in a layer of H KV heads, and every later token. A head has at least
``floor(safeguard * budget)`` of these slots and at most ``floor(head_factor * budget)``. The larger number is allocated
for each head, because arrays have one length for all heads.

Score: the score of `SnapKV`, s[h, i] for token i and KV head h, infinite for the last W = ``obs_window`` tokens of the
prompt. Each head is given its own best tokens up to the safeguard. The other slots of the layer go to the best scores
of all heads together, whichever head they are in.

**Source**: Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM
Inference" (arXiv:2407.11550, algorithm 1); NVIDIA/kvpress 8bb29b9, AdaKVPress around SnapKVPress, for the safeguard,
which counts the window, and for one set per KV head.

**Departures**: a head keeps at most ``head_factor`` times the budget; what it would keep beyond that goes to the other
heads. The released code (FFY0/AdaKV efe4e2e) stores heads of any length one behind the other and reads them with a
kernel of variable lengths. Here a decode step goes over the slots of a row's longest head, and the accounting counts
the slots that hold a token. kvpress masks and frees nothing. The released code takes the safeguard from the budget
without the window.
"""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache
from kvjax.cache.divided import whole
from kvjax.protocol.families import WindowEviction
from kvjax.protocol.method import Prompt
from kvjax.protocol.typing import pytree, static, traced
from kvjax.selection import among_best, best_of_heads, compact, floor_share, top_slots


@pytree
class AdaKV(WindowEviction):
    """SnapKV with a budget that the heads of a layer share; see the module docstring."""

    budget: int | Array = traced("prompt slots kept per KV head, mean of a layer", default=1024, least=1, within="capacity")
    capacity: int = static("the largest budget; None = budget", default=None, least=1)
    head_factor: float = static("the most that one head keeps, as a multiple of the budget", default=2.0, least=1)

    PAPER: ClassVar[str] = "arXiv:2407.11550"
    TITLE: ClassVar[str] = "Ada-KV"
    safeguard = 0.2  # share of the budget that every head keeps at least

    keeps = "`budget` tokens per KV head, mean over a layer's heads"
    slot_block = 1

    def kept(self, cache: LayerCache, prompt: Prompt) -> tuple[Array, Array]:
        score = self.score(cache, prompt)
        capacity, budget = self.capacity, jnp.asarray(self.budget).astype(jnp.int32)
        most = min(self.slots_again(), cache.row_slots)
        of_head = floor_share(self.head_factor, budget)
        slots, held = top_slots(score, whole(cache.valid, cache), of_head, most)  # the candidates of each head
        value = jnp.maximum(jnp.take_along_axis(score, slots, axis=2), jnp.finfo(jnp.float32).min)
        value = jnp.where(held, value, -jnp.inf)
        value = jnp.where(among_best(value, floor_share(self.safeguard, budget), most), jnp.inf, value)
        chosen = best_of_heads(value[:, None], budget, capacity)[:, 0]
        listed, keep = compact(chosen, most)
        return jnp.take_along_axis(slots, listed, axis=2), keep

    def slots_again(self) -> int:
        return floor_share(self.head_factor, self.capacity)
