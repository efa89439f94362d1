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
code has one, and so has this method. The released code holds the cosines of all pairs. Here the sum over i of all cosines is
the product of a key with the sum of all keys, and what remains to be found are the tokens that are not to blame: for each i,
tiles of cosines are computed from the newest tokens back, until every token of the tile has one above ``threshold``. So a
KV head needs at most 2 n^2 D floating-point operations, once for the prompt, and memory for one tile. As in the released
code, keys have norm 1 in the dtype of the cache before they are multiplied; sums are in float32 here, there in that dtype.
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
from kvjax.selection import pick, smooth
from kvjax.slots import check_budget
from kvjax.typing import pytree, static, traced
from pallas_kernels.numerics import product_precision

_WHOLE = 1 << 21  # of so few cosines per head, a decode step's, there are no tiles: a loop would have to wait for the host
_TILE = 1024, 2048  # tokens i and j whose cosines are computed at once


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
        key = jnp.where(cache.valid[..., None], cache.key, 0)
        value = self.mix * self._importance(query, key, prefix) - (1 - self.mix) * self._redundancy(key, cache.valid)
        return jnp.where(recent, jnp.inf, value)

    def _importance(self, query: Array, key: Array, prefix: Array) -> Array:
        """Of key [B, H, S, D] to query [B, H, G, W, D]; 0 where not ``prefix`` bool [B, H, S]: float32 [B, H, S]."""
        logits = _products("bhgwd,bhsd->bhgws", query, key).max(axis=2)
        logits = jnp.where(prefix[:, :, None], logits / math.sqrt(key.shape[3]), jnp.finfo(jnp.float32).min)
        mass = jnp.where(prefix, jax.nn.softmax(logits, axis=3).mean(axis=2), -jnp.inf)
        return jnp.where(prefix, smooth(mass, self.kernel, "max"), 0)

    def _redundancy(self, key: Array, valid: Array) -> Array:
        """Of key [B, H, S, D], which is 0 where not ``valid`` bool [B, H, S]: float32 [B, H, S]."""
        slots, wide = key.shape[2], key.astype(jnp.float32)
        unit = (wide / (jnp.linalg.norm(wide, axis=3, keepdims=True) + 1e-8)).astype(key.dtype)
        unit = lax.optimization_barrier(unit)  # what follows reads this, no float32 copy
        order = jnp.arange(slots, dtype=jnp.int32)
        rows, columns = (slots, slots) if slots * slots <= _WHOLE else (min(size, slots) for size in _TILE)

        def newest(own: Array, at: Array, counts: Array) -> Array:
            """The newest other slot whose key is near those of slots ``at`` int32 [I], 0 if none is: int32 [B, H, I]."""

            def tile(first: Array | int) -> Array:
                there = (first + order[:columns])[None, None, None]
                other = lax.dynamic_slice_in_dim(unit, first, columns, 2)
                near = _products("bhid,bhjd->bhij", own, other) > self.threshold
                return jnp.where(near & (at[None, None, :, None] != there), there, -1).max(axis=3)

            if columns == slots:
                return jnp.maximum(tile(0), 0)

            def older(carry: tuple[Array, Array]) -> tuple[Array, Array]:
                number, found = carry
                first = jnp.minimum(number * columns, slots - columns)  # the last tile may have slots of the one before
                return number - 1, jnp.where(found < 0, tile(first), found)

            start = jnp.int32((slots - 1) // columns), jnp.full(counts.shape, -1, jnp.int32)
            return jnp.maximum(lax.while_loop(lambda x: (x[0] >= 0) & (counts & (x[1] < 0)).any(), older, start)[1], 0)

        def spared(number: Array | int, total: Array) -> Array:
            """``total`` without the cosines of one more tile of tokens i for which token j is not to blame."""
            first = jnp.minimum(number * rows, slots - rows)
            at = first + order[:rows]
            own, counts = (lax.dynamic_slice_in_dim(x, first, rows, 2) for x in (unit, valid))
            counts = counts & (at >= number * rows)[None, None]
            found = newest(own, at, counts)
            cosine = _products("bhid,bhid->bhi", own, pick(unit, found))
            # That with itself is not in the total.
            cosine = jnp.where(counts & (found != at[None, None]), cosine, 0)[..., None]
            return total - jnp.where(found[..., None] == order[None, None, None], cosine, 0).sum(axis=2)

        everyone = jnp.sum(unit, axis=2, keepdims=True, dtype=jnp.float32)
        wide = unit.astype(jnp.float32)
        total = jnp.sum(wide * (everyone - wide), axis=3)  # the sum over i of all cosines but that with itself
        total = spared(0, total) if rows == slots else lax.fori_loop(0, -(-slots // rows), spared, total)
        mean = total / jnp.maximum(jnp.sum(valid, axis=2, keepdims=True, dtype=jnp.int32), 1).astype(jnp.float32)
        return jax.nn.softmax(jnp.where(valid, mean, jnp.finfo(jnp.float32).min), axis=2)


def _products(axes: str, one: Array, other: Array) -> Array:
    """`jnp.einsum` of two arrays of the same dtype, summed in float32."""
    exact = product_precision(one.dtype)
    return jnp.einsum(axes, one, other, precision=exact, preferred_element_type=jnp.float32)
