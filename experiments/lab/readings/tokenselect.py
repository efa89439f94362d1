"""TokenSelect's votes read otherwise: each head counts its own best tokens, or logits are added up as they are."""

from __future__ import annotations

import abc

import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import LayerStorage
from kvjax.cache.divided import best_slots
from kvjax.methods import TokenSelect
from kvjax.protocol.typing import pytree
from pallas_kernels import axes


class _Vote(TokenSelect):
    """TokenSelect with votes in plain JAX, without pooling, over slots that are not divided."""

    def _score(self, cache: LayerStorage, query: Array, stop: Array) -> Array:
        slot = jnp.arange(cache.num_slots, dtype=jnp.int32)[None]
        candidate = (slot >= self.num_sink) & (slot < stop[:, None])
        key = jnp.where(candidate[:, None, :, None], cache.key, 0).astype(jnp.float32)
        logits = jnp.einsum("bhgd,bhsd->bhgs", query, key, precision=lax.Precision.HIGHEST)
        return jnp.where(candidate, axes.total(self.votes(cache, logits, candidate)), -jnp.inf)

    @abc.abstractmethod
    def votes(self, cache: LayerStorage, logits: Array, candidate: Array) -> Array:
        """Count votes float32 [B, S] from logits [B, H, G, S] and ``candidate`` bool [B, S]."""


@pytree
class HardVotes(_Vote):
    """Every query head votes for its own ``budget`` best tokens."""

    def votes(self, cache: LayerStorage, logits: Array, candidate: Array) -> Array:
        batch, size = candidate.shape
        score = jnp.where(candidate[:, None, None], logits, -jnp.inf).reshape(batch, -1, size)
        best, ranked = best_slots(score, self.budget, self.capacity, cache)
        best = jnp.where(ranked, best, size).reshape(batch, -1)
        return jnp.zeros((batch, size), jnp.float32).at[jnp.arange(batch)[:, None], best].add(1, mode="drop")


@pytree
class RawVotes(_Vote):
    """The vote is the sum of logits."""

    def votes(self, cache: LayerStorage, logits: Array, candidate: Array) -> Array:
        return logits.sum(axis=(1, 2))
