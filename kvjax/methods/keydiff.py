"""KeyDiff: keep the keys that differ most from their mean direction; no query and no attention map is needed.

Stored per KV head: ``budget`` tokens. The prompt is prefilled in blocks of ``block`` tokens. A block is appended and attends
to all stored tokens; then the cache is cut back to the budget. So memory is bounded from the first token on. Decoding does
the same with blocks of one token.

Score of token i, where k are the rotated keys in the cache::

    s_i = - cos( mu, k_i ),    mu = mean over j of k_j / |k_j|

**Source**: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments" (arXiv:2504.15364).

A decode step needs the sum of all directions k_j / |k_j|, in which it changes two terms: so each layer keeps the sum, in
integers, so that no rounding error accumulates (`store.keydiff.evict_alike`). It is computed at the prompt's end.

**Departures**: none known in the block variant. No recent window is protected, so the newest token can be evicted at once,
as published. NVIDIA/kvpress has other variants: its KeyDiffPress prefills densely and scores all keys once, as a ``block``
that holds the whole prompt does here; its BlockPress around KeyDiffPress evicts block by block, but after a dense prefill.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache, LayerSpec, LayerStorage
from kvjax.protocol.method import Step
from kvjax.protocol.slots import BoundedSlots, SlotState, count_all
from kvjax.protocol.typing import pytree
from pallas_kernels.score.keydiff.dissimilarity import dissimilarity
from pallas_kernels.store.keydiff.evict_alike import direction_sum, evict_alike


@pytree
class Directions:
    """The sum of the directions of the keys that a layer holds."""

    total: Array  # int32 [B, H, 2, D], their sum, see `direction_sum`
    done: Array  # int32 [B], zeros, for the kernel that evicts


@pytree
class KeyDiff(BoundedSlots):
    """A bounded cache of keys that differ from each other; see the module docstring."""

    PAPER: ClassVar[str] = "arXiv:2504.15364"
    slot_block = 0  # the storage is bounded

    def score(self, cache: LayerCache) -> Array:
        return dissimilarity(cache.key, cache.position)

    def finish(self, state: SlotState, spec: LayerSpec) -> SlotState:
        return state if state.aux is not None else SlotState(cache=state.cache, aux=_directions(state.cache))

    def update(
        self, cache: LayerCache, aux: Directions | None, step: Step, mass: Array | None
    ) -> tuple[LayerCache, Directions | None]:
        if aux is None or step.position.shape[1] > 1:  # aux is None until the prompt has been read
            changed, _ = super().update(cache, None, step, mass)
            return changed, None if aux is None else _directions(changed)
        held = *cache.stored, cache.position, cache.cursor
        kept = evict_alike(*held, aux.total, aux.done, newest=step.position[:, 0], budget=self.budget)
        return cache.holding(*kept[:4]), Directions(total=kept.total, done=kept.done)

    def count(self, cache: LayerStorage, aux: Directions | None, shared: Any) -> tuple[Array, Array]:
        slots, nothing = count_all(cache)
        return slots, nothing if aux is None else jnp.full(nothing.shape, aux.total[0, 0].nbytes, jnp.float32)


def _directions(cache: LayerStorage) -> Directions:
    return Directions(total=direction_sum(cache.key, cache.position), done=jnp.zeros(cache.cursor.shape, jnp.int32))
