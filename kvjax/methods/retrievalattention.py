"""RetrievalAttention: each query head searches the prompt's keys for those with its largest q.k.

Stored: all keys and values; for each KV head the number of tokens that the last step found, for the accounting. There is no
index: this is the exact search, the quality that an index can reach at most.

Score of a searched key k_i for query head (h, g)::

    s[h, g, i] = q[h, g] . k_i / sqrt(D)

A query head attends to the first ``num_sink`` tokens of the row, to the last ``num_local`` tokens of the prompt and to all
tokens after them. It also attends to the ``budget`` tokens between that are best for this head. Once more than ``buffer``
tokens have followed the prompt, the oldest tokens at the end join the searched ones.

A KV head reads what any of its G query heads has found, each row once: between ``budget`` and G times as many tokens. The
list has G * ``capacity`` entries, and a query head ignores entries that it has not found itself.

**Source**: Liu et al., "RetrievalAttention: Accelerating Long-Context LLM Inference via Vector Retrieval"
(arXiv:2409.10516); microsoft/MInference fb56c91 for the sizes and for the exact search, which its port has.

**Departures**: the paper finds some 100 keys in a graph on the host that was made from the prompt's queries; here, as in the
port, all keys are compared, and the accounting counts the keys that are read for it as metadata. One softmax goes over the
union of the found tokens and both ends; the port joins two by their log-sum-exp, which is the same. Its side buffer of
generated tokens has no bound by default. Before the first step, the accounting assumes that the query heads of a group find
the same tokens. In the paper, keys, values and graph are in host memory, and the host's processor searches. Here every key is
read in every step, so with ``offload`` only the values are in host memory; the found tokens' values are read from there.
"""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache, LayerStorage
from kvjax.methods.budgets import searched
from kvjax.protocol.scan import Regions, ScoredScan
from kvjax.protocol.typing import EMPTY, pytree, static, traced
from pallas_kernels.score.vector_score import vector_score


@pytree
class Ends:
    """The state that is kept in addition to the cache."""

    first: Array  # int32 [B], the first slot of the prompt's last tokens
    found: Array  # int32 [B, H], tokens that the last step found; EMPTY before the first step


@pytree
class RetrievalAttention(ScoredScan):
    """Exact search over the prompt's keys by every query head; see the module docstring."""

    budget: int | Array = traced("tokens found per query head, besides both ends", default=2000, least=1, within="capacity")
    capacity: int = static("entries allocated for them; None = budget", default=None, least=1)
    num_sink: int = static("first tokens, always attended", default=128, least=0)
    num_local: int = static("last tokens of the prompt, attended besides those that follow it", default=512, least=0)
    offload: bool | float = static("values in host memory; a number: share of the layers", default=False, least=0, most=1)

    PAPER: ClassVar[str] = "arXiv:2409.10516"
    buffer = 1024  # tokens that may follow before the oldest attended ones are searched

    keys_stay = True

    @classmethod
    def at_length(cls, length: int) -> tuple[dict[str, Any], str]:
        return searched(length, 128, 512, " for each query head")

    def index(self, cache: LayerCache) -> Ends:
        none = jnp.full(cache.position.shape[:2], EMPTY, jnp.int32)
        return Ends(first=jnp.maximum(cache.cursor - self.num_local, self.num_sink), found=none)

    def join(self, aux: Ends, cache: LayerStorage, position: Array) -> Ends:
        return aux

    def joined(self, aux: Ends, found: Array) -> Ends:
        return dataclasses.replace(aux, found=jnp.where(found >= 0, found, aux.found))

    def most_near(self, slots: int) -> int:
        return self.num_local + self.buffer

    def regions(self, cache: LayerStorage, aux: Ends) -> Regions:
        most_near = self.most_near(cache.num_slots)
        return Regions(
            near=jnp.maximum(aux.first, cache.cursor - most_near),
            most_near=most_near,
            wanted=self.budget,
            most_wanted=self.capacity,
            found=aux.found,
        )

    def score(self, cache: LayerStorage, aux: Ends, query: Array, searched: Array) -> Array:
        # The order is the same without 1/sqrt(D). XLA dequantises codes inside its product, where nothing is stored.
        way = None if cache.codes is None else "xla"
        where = {"position": cache.position, "first": self.num_sink, "reduce": "each"}
        return vector_score(query, cache.key, self.regions(cache, aux).near, **where, implementation=way)

    def scan_bytes(self, cache: LayerStorage, aux: Ends, searched: Array) -> Array:
        return searched * (cache.key.shape[-1] * cache.key.dtype.itemsize)
