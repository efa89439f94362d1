"""MagicPIG: sample tokens by collisions in hash tables; each sampled weight is divided by its chance to be sampled.

Stored: all keys and values; for each token of the prompt its bucket in ``num_tables`` tables of ``num_bits`` sign bits (a
byte each up to 8 bits, else two); for each KV head the mean m of the keys that are sampled from; for each query head the
last query's buckets, from which the accounting knows how many tokens were sampled.

Keys are hashed as k - m, queries as they are. Key i is sampled for query head (h, g) if their buckets are equal in two tables
or more. Its logit in the softmax is corrected by the chance w of that, which follows from the angle between q and k - m::

    p = 1 - angle(q[h, g], k_i - m_h) / pi
    w = 1 - (1 - p^K)^L - L p^K (1 - p^K)^(L-1)       K = num_bits, L = num_tables
    logit[h, g, i] = q[h, g] . k_i / sqrt(D) - log(w + 0.0001)

The first ``num_sink`` tokens, the prompt's last ``num_local`` and all later tokens are in the softmax with their own logits,
without a correction. Layers whose number is a multiple of ``dense_every`` attend to all tokens.

**Source**: Chen et al., "MagicPIG: LSH Sampling for Efficient LLM Generation" (arXiv:2410.16179); Infini-AI-Lab/MagicPIG
ac9aa36 for the sizes, the centre, the dense layers and the correction.

**Departures**: buckets are compared one by one, and a step attends with a mask over all slots: the mathematics of the tables,
not their speed; the accounting counts what tables would read. The code subtracts the mean from all keys, which changes each
logit of a query by the same number; here it is subtracted only where keys are hashed and angles are measured. Each sampled
token counts for its own query heads, and once for its KV head in the accounting. A key that is equal to the mean is taken to
be at a right angle. All layers have the same planes, those of JAX's generator. Everything is on the device.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.method import LayerMethod, Prompt, Step
from kvjax.methods.full import Full
from kvjax.scan import by_blocks
from kvjax.sign_codes import buckets, random_planes
from kvjax.slots import SlotMethod, count_all
from kvjax.typing import pytree, static, traced
from pallas_kernels.numerics import product_precision

_NEVER = -1  # a bucket that no key has
_SMOOTH = 1e-4  # keeps the correction of the rarest keys finite


@pytree
class Tables:
    """The buckets of the prompt's tokens, and what else a step needs."""

    ids: Array  # uint8 or uint16 [B, H, S, L], the bucket in each table; anything outside of the sampled slots
    centre: Array  # float32 [B, H, D], mean of the keys of these slots
    near: Array  # int32 [B], the slot that ends them
    last: Array  # int32 [B, H, G, L], buckets of the last step's query, -1 before the first step


@pytree
class MagicPIG(SlotMethod):
    """Importance sampling by hash tables; see the module docstring."""

    num_tables: int = static(default=150, least=2)  # hash tables
    num_bits: int = static(default=10, least=1, most=16)  # sign bits of a bucket
    num_sink: int = static(default=4, least=0)  # first tokens, always attended
    num_local: int = static(default=64, least=0)  # last tokens of the prompt, always attended
    dense_every: int = static(default=16, least=0)  # layers with a multiple of this number are dense; 0 = none
    seed: int | Array = traced(default=0, least=0)  # of the random planes

    PAPER: ClassVar[str] = "arXiv:2410.16179"

    composable = False  # wrappers know slots, but not the corrections of logits

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return Full() if self.dense_every and layer % self.dense_every == 0 else self

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Tables]:
        near = jnp.maximum(cache.cursor - self.num_local, self.num_sink)
        used = self._sampled_from(cache, near)[..., None]
        count = jnp.maximum(jnp.sum(used, axis=2, dtype=jnp.float32), 1)
        centre = jnp.sum(jnp.where(used, cache.key, 0), axis=2, dtype=jnp.float32) / count
        planes = self._planes(cache)
        ids = by_blocks(lambda key: buckets(key.astype(jnp.float32) - centre[:, :, None], planes), cache.key)
        batch, heads, group = prompt.query.shape[:3]
        last = jnp.full((batch, heads, group, self.num_tables), _NEVER, jnp.int32)
        return cache, Tables(ids=jnp.where(used, ids, 0), centre=centre, near=near, last=last)

    def select(self, cache: LayerStorage, aux: Tables, step: Step) -> Selection:
        query, exact = step.query[..., 0, :], product_precision(cache.key.dtype)
        product = jnp.einsum("bhgd,bhsd->bhgs", query, cache.key, precision=exact, preferred_element_type=jnp.float32)
        centred = cache.key.astype(jnp.float32) - aux.centre[:, :, None]
        product = product - jnp.sum(query.astype(jnp.float32) * aux.centre[:, :, None], axis=3)[..., None]
        norms = _norm(query)[..., None] * _norm(centred)[:, :, None]
        angle = jnp.arccos(jnp.clip(jnp.where(norms > 0, product / jnp.where(norms > 0, norms, 1), 0), -1, 1))
        same = lax.integer_pow(1 - angle / math.pi, self.num_bits)  # the chance of equal buckets in one table
        others = lax.integer_pow(1 - same, self.num_tables - 1)
        none, once = (1 - same) * others, self.num_tables * same * others
        correction = -jnp.log(1 - none - once + _SMOOTH)
        sampled_from = self._sampled_from(cache, aux.near)
        dense = (cache.valid & ~sampled_from)[:, :, None]
        sampled = sampled_from[:, :, None] & self._collide(aux.ids, buckets(query, self._planes(cache)))
        bias = jnp.where(dense, 0, jnp.where(sampled, correction, -jnp.inf))
        slots = jnp.broadcast_to(jnp.arange(cache.num_slots, dtype=jnp.int32)[None, None], cache.position.shape)
        return Selection(slots=slots, mask=(dense | sampled).any(axis=2), bias=bias)

    def update(
        self, cache: LayerStorage, aux: Tables, step: Step, mass: Array | None
    ) -> tuple[LayerStorage, Tables]:
        if step.position.shape[1] > 1:  # these tokens attended to all
            return cache, aux
        last = buckets(step.query[..., 0, :], self._planes(cache)).astype(jnp.int32)
        last = jnp.where((step.position >= 0)[:, :, None, None], last, aux.last)
        return cache, Tables(ids=aux.ids, centre=aux.centre, near=aux.near, last=last)

    def count(self, cache: LayerStorage, aux: Tables, shared: Any) -> tuple[Array, Array]:
        """As many tokens as the last step sampled; the buckets are those of all tokens that it sampled from."""
        stored, _ = count_all(cache)
        sampled_from = self._sampled_from(cache, aux.near)
        missed = sampled_from & ~self._collide(aux.ids, aux.last).any(axis=2)
        searched = jnp.sum(sampled_from, axis=2, dtype=jnp.float32)
        return stored - jnp.sum(missed, axis=2, dtype=jnp.int32), searched * (self.num_tables * aux.ids.dtype.itemsize)

    def _sampled_from(self, cache: LayerStorage, near: Array) -> Array:
        """Whether each slot holds a token that is attended only when it is sampled: bool [B, H, S]."""
        slot = jnp.arange(cache.num_slots, dtype=jnp.int32)[None, None]
        return cache.valid & (slot >= self.num_sink) & (slot < near[:, None, None])

    def _collide(self, ids: Array, query: Array) -> Array:
        """Whether keys [B, H, S, L] and queries [B, H, G, L] have two equal buckets or more: bool [B, H, G, S]."""
        known, query = query[..., :1] >= 0, query.astype(ids.dtype)
        # One query head after the other: for all at once a GPU has too few registers.
        heads = [jnp.sum(ids == query[:, :, g, None], axis=3, dtype=jnp.int32) for g in range(query.shape[2])]
        return (jnp.stack(heads, axis=2) >= 2) & known

    def _planes(self, cache: LayerStorage) -> Array:
        return random_planes(self.seed, self.num_tables, self.num_bits, cache.key.shape[3])


def _norm(x: Array) -> Array:
    """The norm of vectors [..., D]: float32 [...]."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))
