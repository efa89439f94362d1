"""PQCache: search tokens by product-quantised keys of 12 bits: the nearest of 64 centroids for each half of a key.

Stored: all keys and values; for each KV head a codebook of ``num_centroids`` centroids in float32 for each of
``num_subvectors`` parts of the channels; for each token the numbers of its centroids, packed: 1.5 bytes. The codebooks are
made once, by k-means of the prompt's keys behind the first ``num_sink``. Later tokens get the centroids that are nearest.

Score of a searched key, where c(i) is the key that its centroids make: the share of attention that the group pays to it::

    s[h, i] = sum over g of  softmax_i( q[h, g] . c(i) / sqrt(D) )

The budget is frozen with the prompt. Of its m tokens behind the sinks, every step attends to floor(m * fraction / 2) searched
tokens, and to as many of the newest before its own (``recent_share`` says how the two divide); and to the sinks. If m is
at most ``num_centroids``, both numbers are ``num_centroids``, so that the step attends to all tokens at first.

**Source**: Zhang et al., "PQCache: Product Quantization-based KVCache for Long Context LLM Inference" (arXiv:2407.12820);
HugoZHL/PQCache 0b74e12 for the sizes and the division of the budget.

**Departures**: k-means begins with evenly spaced keys of the prompt and does ``iterations`` rounds; in the code it begins
with keys drawn at random, and a model of the time that the prompt takes bounds the rounds. In the code the rounds end early
once the centroids hardly move, and a centroid without keys moves to a far key; here it stays where it is. Scores are in
float32, in the code in float16. Shares are raised by a millionth before they are rounded down, so that a tenth of ten is 1 in
float32. A token gets its centroids when it arrives, not when it leaves the newest ones, which changes nothing. Where m is at
most ``num_centroids``, the code attends to all tokens, however many follow. There is no Euclidean form of the inner product
(the code's metric "ip"). With ``offload`` keys and values are in host memory, as in the code, and a step reads the tokens
that it has found where they are: there is no cache on the device of blocks that earlier steps have found, and nothing is
copied ahead.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.attention.over_cache import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.methods.budgets import SHARE
from kvjax.methods.pqcache.product_codes import kmeans
from kvjax.protocol.method import Step
from kvjax.protocol.scan import Regions, ScanRetrieval, by_blocks, shortest
from kvjax.protocol.typing import pytree, static, traced
from pallas_kernels.choose.pqcache.code_select import code_bits, code_select
from pallas_kernels.formats import bit_codes
from pallas_kernels.store.pqcache.store_ids import code_of, nearest, store_ids

_SLACK = 1e-6


@pytree
class Codebooks:
    """The index that is stored in addition to the keys and values; M parts of the channels, C centroids."""

    centroids: Array  # float32 [B, H, M, C, D/M]
    ids: Array  # uint8 [B, H, groups of slots, bytes], see `pallas_kernels.formats.bit_codes`; 0 for empty slots
    prompt: Array  # int32 [B], the prompt's tokens behind the sinks


@pytree
class PQCache(ScanRetrieval):
    """Search by product-quantised keys; see the module docstring."""

    fraction: float | Array = traced("attended share of the prompt", default=0.1, above=0, most=1, within="capacity")
    capacity: float = static("share to make room for; None = fraction", default=None, above=0, most=1)
    num_sink: int = static("first tokens, always attended", default=32, least=0)
    num_subvectors: int = static("parts of a key's channels, each with its own centroids", default=2, least=1, most=4)
    num_centroids: int = static("centroids for each part", default=64, least=2, most=256)

    PAPER: ClassVar[str] = "arXiv:2407.12820"
    recent_share = 0.5  # part of that share that goes to the newest tokens
    iterations = 20  # rounds of k-means

    @classmethod
    def at_length(cls, length: int) -> tuple[dict[str, Any], str]:
        return {"fraction": 1 / SHARE}, f"1/{SHARE} of the prompt"

    def check(self) -> None:
        if self._code_bits > 16:
            raise ValueError(
                f"PQCache: a key must have at most 16 bits, got num_subvectors={self.num_subvectors} with "
                f"num_centroids={self.num_centroids}, which are {self._code_bits}"
            )

    def index(self, cache: LayerCache) -> Codebooks:
        batch, heads, slots, dim = cache.key.shape
        if dim % self.num_subvectors:
            raise ValueError(f"PQCache: num_subvectors must divide head_dim={dim}, got {self.num_subvectors}")
        slot = jnp.arange(slots, dtype=jnp.int32)[None, None]
        if slots < self.num_centroids:  # nothing will ever be searched
            parts = self.num_subvectors, self.num_centroids, dim // self.num_subvectors
            centroids = jnp.zeros((batch, heads, *parts), jnp.float32)
        else:
            used = cache.valid & (slot >= self.num_sink)
            centroids = kmeans(cache.key, used, self.num_subvectors, self.num_centroids, self.iterations)
        code = by_blocks(lambda key: code_of(nearest(key, centroids), self.num_centroids), cache.key)
        ids = bit_codes.pack(jnp.where(cache.valid, code, 0), self._code_bits)
        return Codebooks(centroids=centroids, ids=ids, prompt=jnp.maximum(cache.cursor - self.num_sink, 0))

    def join(self, aux: Codebooks, cache: LayerStorage, position: Array) -> Codebooks:
        key, copies = cache.newest_key if position.shape[1] == 1 else (cache.key, cache.rows)
        ids = store_ids(key, position, cache.cursor, aux.centroids, aux.ids, rows=copies)
        return Codebooks(centroids=aux.centroids, ids=ids, prompt=aux.prompt)

    def most_near(self, slots: int) -> int:
        return self._most(self.recent_share, slots) + 1

    def regions(self, cache: LayerStorage, aux: Codebooks) -> Regions:
        shares, few = (self.recent_share, 1 - self.recent_share), self.num_centroids
        tokens = aux.prompt.astype(jnp.float32)
        recent, wanted = (jnp.floor(tokens * (self.fraction * share) * (1 + _SLACK)).astype(jnp.int32) for share in shares)
        recent, wanted = (jnp.where(aux.prompt <= few, few, x) for x in (recent, wanted))
        return Regions(
            near=jnp.maximum(cache.cursor - 1 - recent, self.num_sink),
            most_near=self.most_near(cache.num_slots),
            wanted=wanted[:, None],
            most_wanted=self._most(1 - self.recent_share, cache.num_slots),
        )

    def find(self, cache: LayerStorage, aux: Codebooks, step: Step, regions: Regions) -> Selection:
        # Slots are filled without a hole, so the count of tokens says which slots hold one.
        slots, mask = code_select(
            step.query[..., 0, :], aux.centroids, aux.ids, regions.near, cache.cursor, jnp.asarray(regions.wanted)[:, 0],
            first=self.num_sink, capacity=max(min(regions.most_wanted, cache.num_slots), 1), room=regions.most_near,
        )  # fmt: skip
        return shortest(slots, mask, cache.num_slots)

    def scan_bytes(self, cache: LayerStorage, aux: Codebooks, searched: Array) -> Array:
        return searched * (self._code_bits / 8) + aux.centroids[0, 0].size * 4

    def _most(self, share: float, slots: int) -> int:
        """Compute the most tokens that ``share`` of the budget can be in a cache of ``slots`` slots."""
        return max(int(slots * self.capacity * (1 + 2 * _SLACK) * share) + 1, self.num_centroids)

    @property
    def _code_bits(self) -> int:
        """Bits for the numbers of all centroids of a key."""
        return code_bits(self.num_subvectors, self.num_centroids)
