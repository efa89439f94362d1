"""RetrievalAttention: search the prompt's keys for those with the largest q.k; attend to the generated tokens and both ends.

Stored: all keys and values. There is no index: this is the exact search, the quality that an index can reach at most.

Score of a searched key k_i for KV head h, the share of attention that the query heads of the group pay to it together::

    s[h, i] = sum over g of  softmax_i( q[h, g] . k_i / sqrt(D) )

With one query head per KV head this is the order of q.k. A step attends to the first ``num_sink`` tokens of the row, to the
last ``num_local`` tokens of the prompt, to the tokens that came since, and to the ``budget`` best tokens between. When more
than ``buffer`` tokens have come since, the oldest of the last join the searched ones.

**Source**: Liu et al., "RetrievalAttention: Accelerating Long-Context LLM Inference via Vector Retrieval"
(arXiv:2409.10516); microsoft/MInference fb56c91 for the sizes and for the exact search, which its port has.

**Departures**: the paper finds some 100 keys in a graph on the host that was made from the prompt's queries; here, as in the
port, all keys are compared, and the accounting counts the keys that are read for it as metadata. Each KV head has one list
(the sum over the group), where paper and port search for every query head. One softmax goes over the union of both lists;
the port joins two by their log-sum-exp, which is the same. Its side buffer of generated tokens has no bound unless one is
asked for. Everything is on the device.
"""

from __future__ import annotations

import math
from typing import ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache, LayerStorage
from kvjax.scan import Regions, ScanRetrieval, group_share
from kvjax.typing import not_none, pytree, static, traced
from pallas_kernels.numerics import product_precision


@pytree
class RetrievalAttention(ScanRetrieval):
    """Exact search over the prompt's keys; see the module docstring."""

    budget: int | Array = traced(default=2000, least=1, within="capacity")  # tokens found per KV head, besides both ends
    capacity: int | None = static(default=None, least=1)  # entries allocated for them; None = budget
    num_sink: int = static(default=128, least=0)  # first tokens, always attended
    num_local: int = static(default=512, least=0)  # last tokens of the prompt, attended besides those that follow it
    buffer: int = static(default=1024, least=1)  # tokens that may follow before the oldest attended ones are searched

    PAPER: ClassVar[str] = "arXiv:2409.10516"

    def index(self, cache: LayerCache) -> Array:
        """The first slot of the prompt's last tokens: int32 [B]."""
        return jnp.maximum(cache.cursor - self.num_local, self.num_sink)

    def join(self, aux: Array, cache: LayerStorage, slot: Array) -> Array:
        return aux

    def regions(self, cache: LayerStorage, aux: Array) -> Regions:
        most_near = self.num_local + self.buffer
        return Regions(
            near=jnp.maximum(aux, cache.cursor - most_near),
            most_near=most_near,
            wanted=self.budget,
            most_wanted=not_none("capacity", self.capacity),
        )

    def score(self, cache: LayerStorage, aux: Array, query: Array, searched: Array) -> Array:
        exact = product_precision(cache.key.dtype)
        logits = jnp.einsum("bhgd,bhsd->bhgs", query, cache.key, precision=exact, preferred_element_type=jnp.float32)
        return group_share(logits / math.sqrt(query.shape[-1]), searched)

    def scan_bytes(self, cache: LayerStorage, aux: Array, searched: Array) -> Array:
        return searched * (cache.key.shape[-1] * cache.key.dtype.itemsize)
