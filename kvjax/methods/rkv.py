"""RKV: evict while decoding, and keep what the newest queries attend to and what other keys do not repeat.

Stored: ``budget`` tokens per KV head after every eviction, later tokens until the next one, and the last W = ``obs_window``
queries, which are the window. The prompt is evicted at its end, and all that is stored again after every ``interval``
tokens (`kvjax.Periodic`).

Score of token i of KV head h before the window, where n tokens are stored::

    s[h, i] = mix * importance[i] - (1 - mix) * redundancy[i]
    importance = pool( mean over the last W queries t of softmax_i( max over the group of q_t . k_i / sqrt(D) ) )
    redundancy = softmax_j( mean over the n tokens i of c[i, j] )

The softmax of the importance is over the tokens before the window, and its pooling takes the maximum over ``kernel``
neighbours. c[i, j] is the cosine of the keys of tokens i and j, but 0 where i = j, and 0 where j is the newest token whose
cosine with i is above ``threshold``: of tokens that repeat each other, the newest is not to blame. If token i has no such
token, its cosine with the oldest stored token is 0. The window is always kept, and with it the ``budget - W`` best tokens.

**Source**: Cai et al., "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models" (arXiv:2505.24133, section 3);
Zefan-Cai/R-KV 31cf555, of which ``mix``, ``threshold``, ``kernel``, ``obs_window`` and ``interval`` have the defaults of its
scripts.

**Departures**: none known in the score. The paper writes of a number of newest tokens that are not to blame; the released
code has one, and so has this method. The released code holds the cosines of all pairs; here they are computed for a few
tokens at a time. Their number still grows with the square of the prompt, once.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import LayerCache
from kvjax.families import Eviction
from kvjax.method import LayerMethod, Prompt
from kvjax.periodic import Periodic
from kvjax.selection import smooth
from kvjax.slots import check_budget
from kvjax.typing import pytree, static, traced
from pallas_kernels.numerics import product_precision

_PAIRS = 1 << 18  # cosines in memory at once, for each head, so that a decode step needs no large array
_LEAST = 64  # tokens of a block, however many slots there are


@pytree
class RKV(Eviction):
    """Importance less redundancy, evicted while decoding; see the module docstring."""

    budget: int | Array = traced(default=1024, least=1, within="capacity")  # tokens kept per KV head by every eviction
    interval: int | None = static(default=128, least=1)  # tokens between evictions; None evicts at the prompt's end alone
    obs_window: int = static(default=8, least=1)  # newest tokens, whose queries count and which are always kept
    kernel: int = static(default=7, least=1, odd=True)  # pooling window of the importance over neighbouring tokens
    mix: float | Array = traced(default=0.1, least=0, most=1)  # weight of the importance; the rest is the redundancy's
    threshold: float | Array = traced(default=0.5, least=0, most=1)  # cosine above which two keys repeat each other

    PAPER: ClassVar[str] = "arXiv:2505.24133"

    keeps = "`budget` tokens per KV head, and up to `interval` newer ones"

    def check(self) -> None:
        check_budget(self, self.obs_window, f"the obs_window={self.obs_window} recent tokens")

    @property
    def moves_slots(self) -> bool:
        return self.interval is not None

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        if self.interval is None:
            return self
        return Periodic(evict=dataclasses.replace(self, interval=None), interval=self.interval)

    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        query, position = prompt.query[..., -self.obs_window :, :], prompt.query_position[:, -self.obs_window :]
        recent = cache.position >= (position.max(axis=1) + 1 - self.obs_window)[:, None, None]
        prefix = cache.valid & ~recent
        key = jnp.where(cache.valid[..., None], cache.key, 0).astype(jnp.float32)
        value = self.mix * self._importance(query, key, prefix) - (1 - self.mix) * self._redundancy(key, cache.valid)
        return jnp.where(recent, jnp.inf, value)

    def _importance(self, query: Array, key: Array, prefix: Array) -> Array:
        """Of key float32 [B, H, S, D] to query [B, H, G, W, D]; 0 where not ``prefix`` bool [B, H, S]: float32 [B, H, S]."""
        exact = product_precision(jnp.float32)
        logits = jnp.einsum("bhgwd,bhsd->bhgws", query.astype(jnp.float32), key, precision=exact).max(axis=2)
        logits = jnp.where(prefix[:, :, None], logits / math.sqrt(key.shape[3]), jnp.finfo(jnp.float32).min)
        mass = jnp.where(prefix, jax.nn.softmax(logits, axis=3).mean(axis=2), -jnp.inf)
        return jnp.where(prefix, smooth(mass, self.kernel, "max"), 0)

    def _redundancy(self, key: Array, valid: Array) -> Array:
        """Of key float32 [B, H, S, D], which is 0 where not ``valid`` bool [B, H, S]: float32 [B, H, S]."""
        slots, exact = key.shape[2], product_precision(jnp.float32)
        unit = key / (jnp.linalg.norm(key, axis=3, keepdims=True) + 1e-8)
        size = min(max(_PAIRS // slots, _LEAST), slots)
        order = jnp.arange(slots, dtype=jnp.int32)[None, None, None]

        def add(index: Array, total: Array) -> Array:
            """The sums of c[i, j] over i, with those of one more block of tokens i."""
            first = jnp.minimum(index * size, slots - size)  # the last block may have tokens of the block before
            block = first + jnp.arange(size, dtype=jnp.int32)
            counts = lax.dynamic_slice_in_dim(valid, first, size, 2) & (block >= index * size)[None, None]
            own = lax.dynamic_slice_in_dim(unit, first, size, 2)
            cosine = jnp.einsum("bhid,bhjd->bhij", own, unit, precision=exact)
            cosine = jnp.where(block[None, None, :, None] == order, 0, cosine)
            newest = jnp.where(cosine > self.threshold, order, 0).max(axis=3, keepdims=True)
            cosine = jnp.where(counts[..., None] & (newest != order), cosine, 0)
            return total + cosine.sum(axis=2)

        total = lax.fori_loop(0, -(-slots // size), add, jnp.zeros(valid.shape, jnp.float32))
        mean = total / jnp.maximum(jnp.sum(valid, axis=2, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
        return jax.nn.softmax(jnp.where(valid, mean, jnp.finfo(jnp.float32).min), axis=2)
