"""KeyDiff: keep the keys that differ most from their mean direction; no query and no attention map is needed.

Stored per KV head: ``budget`` tokens. The prompt is read in blocks of ``block`` tokens. A block is appended and attends to
all stored tokens; then the cache is cut back to the budget. So memory is bounded from the first token on. Decoding does the
same with blocks of one token.

Score of token i, where k are the rotated keys in the cache::

    s_i = - cos( mu, k_i ),    mu = mean over j of k_j / |k_j|

**Source**: Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments" (arXiv:2504.15364).

**Departures**: none known in the block variant. No recent window is protected, so the newest token can be evicted at once,
as published. NVIDIA/kvpress has other variants: its KeyDiffPress reads the prompt densely and scores all keys once, as here a
``block`` does that holds the whole prompt; its BlockPress around KeyDiffPress evicts block by block, but after a dense
prefill.
"""

from __future__ import annotations

from typing import ClassVar

from jax import Array

from kvjax.cache import LayerCache
from kvjax.slots import BoundedSlots
from kvjax.typing import pytree
from pallas_kernels.dissimilarity import dissimilarity


@pytree
class KeyDiff(BoundedSlots):
    """A bounded cache of keys that differ from each other; see the module docstring."""

    PAPER: ClassVar[str] = "arXiv:2504.15364"
    slot_block = 0  # the storage is bounded

    def score(self, cache: LayerCache) -> Array:
        return dissimilarity(cache.key, cache.position)
