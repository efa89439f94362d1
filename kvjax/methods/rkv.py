"""RKV: evict while decoding, and keep what the newest queries attend to and what other keys do not repeat.

Stored: ``budget`` tokens per KV head after every eviction, later tokens until the next one, and the last W = ``obs_window``
queries, which are the window. The prompt is evicted at its end, and all that is stored again after every ``interval``
tokens (`kvjax.wrappers.Periodic`).

Score of token i of KV head h before the window, where n tokens are stored::

    s[h, i] = mix * importance[i] - (1 - mix) * redundancy[i]
    importance = pool( mean over the last W queries t of softmax_i( max over the group of q_t . k_i / sqrt(D) ) )
    redundancy = softmax_j( mean over the n tokens i of c[i, j] )

The softmax of the importance is over the tokens before the window, and its pooling takes the maximum over ``kernel``
neighbours. c[i, j] is the cosine of the keys of tokens i and j, but 0 where i = j, and 0 where j is the newest token whose
cosine with i is above ``threshold``: of tokens that repeat each other, the newest is not penalised. If token i has no such
token, its cosine with the oldest stored token is 0. The window is always kept, and with it the ``budget - W`` best tokens.

**Source**: Cai et al., "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models" (arXiv:2505.24133, section 3);
Zefan-Cai/R-KV 31cf555, whose scripts give the defaults of ``mix``, ``threshold``, ``kernel``, ``obs_window`` and
``interval``.

**Departures**: none known in the score. The paper exempts several newest tokens from the penalty; the released code exempts
one, and so does this method. The released code holds the cosines of all pairs. Here the sum over i of all cosines is the
product of a key with the sum of all keys, and only the exempt tokens remain to be found: for each i, cosines are computed
from the newest tokens back, until one is above ``threshold``
(`pallas_kernels.score.rkv.newest_repeat`). So a KV head needs at most 2 n^2 D floating-point operations, once for the prompt,
and no memory for pairs. As in the released code, keys have norm 1 in the dtype of the cache before they are multiplied;
sums are in float32 here, in the released code in the dtype of the cache. The cosines with exempt tokens are rounded to
multiples of 2^-21 before they are summed.
"""

import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import LayerCache
from kvjax.protocol.method import Prompt
from kvjax.protocol.slots import check_budget
from kvjax.protocol.typing import pytree
from kvjax.selection import pick, smooth
from kvjax.wrappers.periodic import PeriodicEviction
from pallas_kernels.numerics import join_pieces, made_after, product_precision
from pallas_kernels.score.rkv.newest_repeat import newest_repeat

_ONE = 1 << 21  # a cosine of 1 as an integer
_PART = 1 << 11
_ROWS = 1024  # keys that are read at once at least


@pytree
class RKV(PeriodicEviction):
    """Importance less redundancy, evicted while decoding; see the module docstring."""

    PAPER: ClassVar[str] = "arXiv:2505.24133"
    TITLE: ClassVar[str] = "R-KV"
    mix = 0.1  # weight of the importance; the rest is the redundancy's
    obs_window = 8  # newest tokens, whose queries count and which are always kept
    kernel = 7  # pooling window of the importance over neighbouring tokens
    threshold = 0.5  # cosine above which two keys repeat each other

    def check(self) -> None:
        check_budget(self, self.obs_window, f"the obs_window={self.obs_window} recent tokens")

    def score(self, cache: LayerCache, prompt: Prompt) -> Array:
        query, position = prompt.query[..., -self.obs_window :, :], prompt.query_position[:, -self.obs_window :]
        recent = cache.position >= (position.max(axis=1) + 1 - self.obs_window)[:, None, None]
        prefix = cache.valid & ~recent
        # One after the other, because each may need a copy of all keys.
        importance, key = lax.optimization_barrier((self._importance(query, cache.key, prefix), cache.key))
        value = self.mix * importance - (1 - self.mix) * self._redundancy(key, cache.valid)
        return jnp.where(recent, jnp.inf, value)

    def _importance(self, query: Array, key: Array, prefix: Array) -> Array:
        """Score key [B, H, S, D] by query [B, H, G, W, D]; 0 where not ``prefix`` bool [B, H, S]: float32 [B, H, S]."""
        logits = _products("bhgwd,bhsd->bhgws", query, key).max(axis=2)
        logits = jnp.where(prefix[:, :, None], logits / math.sqrt(key.shape[3]), jnp.finfo(jnp.float32).min)
        mass = jnp.where(prefix, jax.nn.softmax(logits, axis=3).mean(axis=2), -jnp.inf)
        return jnp.where(prefix, smooth(mass, self.kernel, "max"), 0)

    def _redundancy(self, key: Array, valid: Array) -> Array:
        """Score how far each key [B, H, S, D] that is ``valid`` bool [B, H, S] is repeated: float32 [B, H, S]."""
        wide = key.astype(jnp.float32)
        unit = (wide / (jnp.linalg.norm(wide, axis=3, keepdims=True) + 1e-8)).astype(key.dtype)
        unit = jnp.where(valid[..., None], unit, 0)
        unit = lax.optimization_barrier(unit)  # later operations read this array, not a float32 copy
        everyone = jnp.sum(unit, axis=2, keepdims=True, dtype=jnp.float32)
        found = newest_repeat(unit, valid, threshold=self.threshold)
        wide = unit.astype(jnp.float32)
        total = jnp.sum(wide * (everyone - wide), axis=3)  # the sum over i of all cosines except with itself
        order = jnp.broadcast_to(jnp.arange(key.shape[2], dtype=jnp.int32), found.shape)
        # Piece by piece, so that the keys that were found are never an array of their own.
        cosine = join_pieces(functools.partial(_cosines, unit), max(_ROWS, key.shape[2] // 16), order, found)
        total = total - _sums_at(found, jnp.where(valid & (found != order), cosine, 0))
        mean = total / jnp.maximum(jnp.sum(valid, axis=2, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
        return jax.nn.softmax(jnp.where(valid, mean, jnp.finfo(jnp.float32).min), axis=2)


def _cosines(unit: Array, one: Array, other: Array) -> Array:
    """Multiply vectors of ``unit`` [B, H, S, D] at two lists of slots int32 [B, H, K]: float32 [B, H, K]."""
    one, other = (pick(unit, slots).astype(jnp.float32) for slots in (one, other))
    return jnp.sum(one * other, axis=3)


def _sums_at(slots: Array, cosine: Array) -> Array:
    """Sum ``cosine`` float32 [B, H, S] over the tokens whose ``slots`` int32 [B, H, S] name a slot, for each slot.

    A GPU adds in any order. Sums of integers do not depend on it, so cosines are rounded to multiples of 1 / `_ONE`. The two
    parts of each integer are summed apart: sums of 2^20 parts fit int32.
    """
    whole = jnp.round(cosine * _ONE).astype(jnp.int32)

    def add(slots: Array, part: Array) -> Array:
        none = made_after(part, jnp.zeros(slots.shape, jnp.int32))
        return none.at[slots].add(part, mode="promise_in_bounds", wrap_negative_indices=False)

    high, low = (jax.vmap(jax.vmap(add))(slots, part).astype(jnp.float32) for part in (whole // _PART, whole % _PART))
    return (high * _PART + low) / _ONE


def _products(axes: str, one: Array, other: Array) -> Array:
    """Multiply two arrays of the same dtype as `jnp.einsum`, summed in float32."""
    exact = product_precision(one.dtype)
    return jnp.einsum(axes, one, other, precision=exact, preferred_element_type=jnp.float32)
