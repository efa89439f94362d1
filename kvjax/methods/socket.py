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
not searched; the code also finds them, and then counts them twice. Buckets of up to 8 bits take a byte, in the code two. The
random planes are those of JAX's generator.
"""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerCache, LayerStorage, put_tokens
from kvjax.scan import Regions, ScoredScan, by_blocks
from kvjax.selection import pick
from kvjax.sign_codes import buckets, corners, projections, random_planes
from kvjax.slots import new_slots
from kvjax.typing import not_none, pytree, static, traced
from pallas_kernels.numerics import product_precision


@pytree
class Hashed:
    """Buckets and norms of all tokens; 0 for empty slots."""

    ids: Array  # uint8 or uint16 [B, H, S, L], the bucket in each table
    norm: Array  # [B, H, S], of the value, in its dtype


@pytree
class SOCKET(ScoredScan):
    """Search by soft votes of hash tables; see the module docstring."""

    budget: int | Array = traced(default=1024, least=1, within="capacity")  # tokens found per KV head, besides both ends
    capacity: int | None = static(default=None, least=1)  # entries allocated for them; None = budget
    num_sink: int = static(default=128, least=0)  # first tokens, always attended
    num_local: int = static(default=128, least=1)  # newest tokens, always attended
    num_tables: int = static(default=60, least=1)  # hash tables
    num_bits: int = static(default=8, least=1, most=12)  # sign bits of a bucket
    temperature: float | Array = traced(default=0.3, above=0)  # lower: only the likeliest buckets count
    seed: int | Array = traced(default=0, least=0)  # of the random planes

    PAPER: ClassVar[str] = "arXiv:2602.06283"

    def index(self, cache: LayerCache) -> Hashed:
        ids = by_blocks(lambda key: buckets(key, self._planes(cache)), cache.key)
        valid = cache.valid
        return Hashed(ids=jnp.where(valid[..., None], ids, 0), norm=jnp.where(valid, _norm(cache.value), 0))

    def join(self, aux: Hashed, cache: LayerStorage, position: Array) -> Hashed:
        slot = new_slots(cache, position)
        at = jnp.where(slot < cache.num_slots, slot, 0)
        key, value = cache.rows_at(at)
        new = Hashed(ids=buckets(key, self._planes(cache)), norm=_norm(value))
        return jax.tree.map(lambda old, x: put_tokens(old, x, slot, None), aux, new)

    def most_near(self, slots: int) -> int:
        return self.num_local

    def regions(self, cache: LayerStorage, aux: Hashed) -> Regions:
        return Regions(
            near=jnp.maximum(cache.cursor - self.num_local, self.num_sink),
            most_near=self.most_near(cache.num_slots),
            wanted=self.budget,
            most_wanted=not_none("capacity", self.capacity),
        )

    def score(self, cache: LayerStorage, aux: Hashed, query: Array, searched: Array) -> Array:
        soft = jnp.tanh(projections(query, self._planes(cache))) / math.sqrt(query.shape[-1])
        exact = product_precision(jnp.float32)
        logits = jnp.einsum("bhglp,cp->bhglc", soft, corners(self.num_bits), precision=exact) / self.temperature
        votes = jax.nn.softmax(logits, axis=4).sum(axis=2)  # of the group: [B, H, L, C]
        first = (jnp.arange(self.num_tables, dtype=jnp.int32) << self.num_bits)[None, None, None]
        at = (aux.ids.astype(jnp.int32) + first).reshape(*aux.ids.shape[:2], -1)
        found = pick(votes.reshape(*votes.shape[:2], -1), at)
        return found.reshape(aux.ids.shape).sum(axis=3) * aux.norm.astype(jnp.float32)

    def scan_bytes(self, cache: LayerStorage, aux: Hashed, searched: Array) -> Array:
        return searched * (self.num_tables * aux.ids.dtype.itemsize + aux.norm.dtype.itemsize)

    def _planes(self, cache: LayerStorage) -> Array:
        return random_planes(self.seed, self.num_tables, self.num_bits, cache.key.shape[3])


def _norm(value: Array) -> Array:
    """The norm of vectors [B, H, N, D], computed in float32: [B, H, N] in their dtype."""
    return jnp.sqrt(jnp.sum(jnp.square(value.astype(jnp.float32)), axis=3)).astype(value.dtype)
