"""SOCKET: search tokens by their buckets in hash tables, each weighted by how likely it is for the query.

Stored: all keys and values; for each token its bucket in ``num_tables`` tables of ``num_bits`` sign bits (a byte each, two
bytes from 9 bits on) and the norm of its value in the dtype of the model: 62 bytes by default. With ``offload`` keys and
values are in host memory.

Score, where bucket c of table l has the corner y_c (a sign for each bit), W_l are the table's random planes and b_l(i) is
the bucket of key i::

    p[h, g, l, c] = softmax_c( tanh(W_l q[h, g]) . y_c / (sqrt(D) * temperature) )
    s[h, i]       = |v_i| * sum over g and l of  p[h, g, l, b_l(i)]

A step attends to the first ``num_sink`` tokens, to the newest ``num_local`` (its own is one of them), and to the ``budget``
best tokens between.

**Source**: Joshi et al., "SOCKET: SOft Collision Kernel EsTimator for Sparse Attention" (arXiv:2602.06283); amarka8/SOCKET
c60abc6 for the score and the sizes, xAlg-ai/sparse-attention-hub 1a048c9 for the sinks and the newest tokens.

**Departures**: each KV head has one list (the sum over the group), in the code every query head. Sinks and newest tokens are
not searched; the code also finds them, and then counts them twice. Buckets of up to 8 bits take one byte, in the code two
bytes. JAX's generator draws the random planes.
"""

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache, LayerStorage
from kvjax.methods.budgets import searched
from kvjax.protocol.scan import Regions, ScoredScan, by_blocks
from kvjax.protocol.typing import pytree, static, traced
from pallas_kernels.formats.sign_codes import buckets, in_blocks, norms, random_planes
from pallas_kernels.score.socket.bucket_score import bucket_score
from pallas_kernels.store.socket.store_buckets import store_buckets


@pytree
class Hashed:
    """Buckets and norms of all tokens; 0 for empty slots."""

    blocks: Array  # uint8 or uint16 [B, H, N, L * 16], the buckets of blocks of 16 tokens, table by table; N is S / 16
    norm: Array  # [B, H, S], of the value, in its dtype


@pytree
class SOCKET(ScoredScan):
    """Search by soft votes of hash tables; see the module docstring."""

    budget: int | Array = traced("tokens found per KV head, besides both ends", default=1024, least=1, within="capacity")
    capacity: int = static("entries allocated for them; None = budget", default=None, least=1)
    num_sink: int = static("first tokens, always attended", default=128, least=0)
    num_local: int = static("newest tokens, always attended", default=128, least=1)
    num_tables: int = static("hash tables", default=60, least=1)
    num_bits: int = static("sign bits of a bucket", default=8, least=1, most=12)
    temperature: float | Array = traced("lower: only the likeliest buckets count", default=0.3, above=0)

    PAPER: ClassVar[str] = "arXiv:2602.06283"
    seed = 0  # of the random planes

    score_is_masked = True
    lacks = ("latent",)

    @classmethod
    def at_length(cls, length: int) -> tuple[dict[str, Any], str]:
        return searched(length, 128, 128)

    def index(self, cache: LayerCache) -> Hashed:
        ids = by_blocks(lambda key: buckets(key, self._planes(cache)), cache.key)
        valid = cache.valid
        ids = jnp.where(valid[..., None], ids, 0)
        norm = jnp.where(valid, norms(cache.value), 0).astype(cache.value.dtype)
        return Hashed(blocks=in_blocks(ids), norm=norm)

    def join(self, aux: Hashed, cache: LayerStorage, position: Array) -> Hashed:
        one = position.shape[1] == 1
        key, value, rows = cache.newest if one else (cache.key, cache.value, cache.rows)
        ids, norm = store_buckets(key, value, position, cache.cursor, self._planes(cache), aux.blocks, aux.norm, rows=rows)
        return Hashed(blocks=ids, norm=norm)

    def most_near(self, slots: int) -> int:
        return self.num_local

    def regions(self, cache: LayerStorage, aux: Hashed) -> Regions:
        return Regions(
            near=jnp.maximum(cache.cursor - self.num_local, self.num_sink),
            most_near=self.most_near(cache.num_slots),
            wanted=self.budget,
            most_wanted=self.capacity,
        )

    def score(self, cache: LayerStorage, aux: Hashed, query: Array, searched: Array) -> Array:
        planes, temperature = self._planes(cache), jnp.asarray(self.temperature, jnp.float32)
        arrays = query, planes, temperature, aux.blocks, aux.norm, cache.position, cache.cursor
        return bucket_score(*arrays, first=self.num_sink, num_local=self.num_local)

    def scan_bytes(self, cache: LayerStorage, aux: Hashed, searched: Array) -> Array:
        return searched * (self.num_tables * aux.blocks.dtype.itemsize + aux.norm.dtype.itemsize)

    def _planes(self, cache: LayerStorage) -> Array:
        return random_planes(self.seed, self.num_tables, self.num_bits, cache.key.shape[3])
