"""Quest: keep every token; attend to the pages whose keys could score highest against the current query.

Stored: all keys and values; for each page of ``page_size`` tokens, the minimum and maximum of the rotated keys per channel.

Score of page p for KV head h: an upper bound of q.k over the page and over the query heads of the group::

    u[h, p] = max over g of  sum over c of  max(q[h, g, c] * min[h, p, c], q[h, g, c] * max[h, p, c])

A step attends to the newest page and to the ``budget / page_size - 1`` best other pages. Layers below ``num_dense_layers``
attend to all tokens.

**Source**: Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (arXiv:2406.10774,
section 3); mit-han-lab/Quest 01c1623.

**Departures**: each KV head has one page list (maximum over the group); the accuracy code repeats the cache for every query
head. The newest page is always attended, as in the system code but not in the accuracy code. The accuracy code's minimum of
three pages is not applied; a budget of less than a page is refused instead.
"""

from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerStorage
from kvjax.methods.full import Full
from kvjax.protocol.families import Retrieval
from kvjax.protocol.method import LayerMethod
from kvjax.protocol.typing import pytree, static
from pallas_kernels.score.page_score import page_score
from pallas_kernels.store.quest.widen_page import widen_page


@pytree
class Box:
    """The bounds of each page's keys per channel, [B, H, P, D] in the keys' dtype; inf and -inf for an empty page."""

    low: Array
    high: Array


@pytree
class Quest(Retrieval):
    """Query-aware page retrieval; see the module docstring."""

    offload: bool | float = static("keys and values in host memory, or a share of layers", default=False, least=0, most=1)
    num_dense_layers: int = static("first layers, which attend to all tokens", default=2, least=0)

    PAPER: ClassVar[str] = "arXiv:2406.10774"

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return Full() if layer < self.num_dense_layers else self

    @property
    def slot_block(self) -> int:
        return self.page_size

    def summarize(self, key: Array, valid: Array) -> Box:
        # An empty page gets the bounds inf and -inf. NaN would do, too, but jax_debug_nans stops at it.
        low, high = (jnp.where(valid[..., None], key, bound) for bound in (jnp.inf, -jnp.inf))
        return Box(low=low.min(axis=3), high=high.max(axis=3))

    def join(self, summary: Box, cache: LayerStorage) -> Box:
        key, rows = cache.newest_key
        low, high = widen_page(
            key, cache.position, cache.here, summary.low, summary.high, page_size=self.page_size, rows=rows
        )
        return Box(low=low, high=high)

    def score(self, summary: Box, query: Array, cursor: Array) -> Array:
        return page_score(query, summary.low, summary.high, cursor, page_size=self.page_size, newest=True)
