"""MagicPIG's selection in plain JAX: the counts of all tokens, then the best of them by sorting."""

import jax
import jax.numpy as jnp

from pallas_kernels.choose.kth_select import kth_select_mask
from pallas_kernels.score.magicpig.bucket_matches.reference import equal_buckets


def match_select(query, ids, near, length, *, first, capacity, room, num_bits):
    """List the first, the sampled and the last slots of each KV head, in plain JAX."""
    equal = equal_buckets(query, ids, near, first)
    most = equal.max(axis=2)  # 0 if no query head has sampled the token
    sampled = jnp.sum(most > 0, axis=2, dtype=jnp.int32)
    score = jnp.where(most > 0, most.astype(jnp.float32), -jnp.inf)
    best, found = kth_select_mask(score, capacity, capacity)
    before = jnp.arange(first, dtype=jnp.int32)[None, None]
    behind = jnp.arange(room, dtype=jnp.int32)[None, None] + near[:, None, None]
    before, behind = (jnp.broadcast_to(x, (*best.shape[:2], x.shape[2])) for x in (before, behind))
    held = length[:, None, None]
    mask = jnp.concatenate([before < held, found, behind < held], axis=2)
    slots = jnp.where(mask, jnp.concatenate([before, best, behind], axis=2), 0)
    among = jnp.arange(mask.shape[2], dtype=jnp.int32)[None, None] - first
    searched = ((among >= 0) & (among < capacity))[:, :, None]
    own = jnp.where(searched, _each(equal, jnp.minimum(slots, equal.shape[3] - 1)) > 0, True)
    return slots, mask, own & mask[:, :, None], sampled


def _each(counts, slots):
    """Take ``counts`` [B, H, G, N] at ``slots`` int32 [B, H, E], which are in range: [B, H, G, E]."""

    def one(counts, slots):
        return counts.at[slots].get(mode="promise_in_bounds", wrap_negative_indices=False)

    return jax.vmap(jax.vmap(jax.vmap(one, (0, None))))(counts, slots)
