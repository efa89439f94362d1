"""Quest: keep every token; attend to the pages whose keys could score highest against the current query.

Stored: all keys and values; per page of ``page_size`` tokens and channel the minimum and maximum of the rotated keys.

Score of page p for KV head h, an upper bound of q.k over the page, the best query head of the group deciding::

    u[h, p] = max over g of  sum over c of  max(q[h, g, c] * min[h, p, c], q[h, g, c] * max[h, p, c])

The newest page is always attended; ``budget / page_size - 1`` others join it. Layers below ``num_dense_layers`` attend
to everything.

**Source**: Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (arXiv:2406.10774,
section 3); mit-han-lab/Quest 01c1623.

**Departures**: one page list per KV head (maximum over the group) where the accuracy code repeats the cache to query
heads. The newest page is forced, as the system code does and the accuracy code does not; the accuracy code's floor of three
pages is not applied, a budget below one page is refused instead.
"""

from __future__ import annotations

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerStorage
from kvjax.families import Retrieval
from kvjax.method import LayerMethod
from kvjax.methods.full import Full
from kvjax.offload import check_offload
from kvjax.slots import check_budget
from kvjax.typing import pytree, static
from pallas_kernels.page_score import page_score
from pallas_kernels.widen_page import widen_page


@pytree
class Box:
    """Per-channel bounds of each page's keys, both [B, H, P, D] in the keys' dtype; both NaN for an empty page."""

    low: Array
    high: Array


@pytree
class Quest(Retrieval):
    """Query-aware page retrieval; see the module docstring."""

    num_dense_layers: int = static(2)  # first layers that attend to everything

    PAPER: ClassVar[str] = "arXiv:2406.10774"

    offloadable = True

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"Quest: page_size must be at least 1 token, got {self.page_size}")
        check_budget(self, self.page_size, f"one page of page_size={self.page_size}")
        check_offload(self)

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return Full() if layer < self.num_dense_layers else self

    def summarize(self, key: Array, valid: Array) -> Box:
        mask, empty = valid[..., None], ~valid.any(axis=3)[..., None]
        low = jnp.where(mask, key, jnp.inf).min(axis=3)
        high = jnp.where(mask, key, -jnp.inf).max(axis=3)
        return Box(low=jnp.where(empty, jnp.nan, low), high=jnp.where(empty, jnp.nan, high))

    def join(self, summary: Box, cache: LayerStorage) -> Box:
        low, high = widen_page(
            cache.key,
            cache.position,
            cache.cursor,
            summary.low,
            summary.high,
            page_size=self.page_size,
            rows=cache.rows,
        )
        return Box(low=low, high=high)

    def score(self, summary: Box, query: Array, cursor: Array) -> Array:
        return page_score(query, summary.low, summary.high, cursor, page_size=self.page_size, newest=True)
