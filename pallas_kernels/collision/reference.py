"""Collision votes in plain JAX: sort the clusters, look up the votes, find the cut by an integer histogram."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.collision.votes import candidate_cut, cluster_scores, collision_votes, sizes, tier_weights
from pallas_kernels.compact import compact
from pallas_kernels.formats.key_codes import rotation


def collision(query, signs, counts, ids, position, stop, shares, *, first, capacity):
    """See ``pallas_kernels.collision.collision``."""
    query = query.astype(jnp.float32).mean(axis=2)
    query = query if signs is None else rotation(query, signs)
    slot = jnp.arange(ids.shape[2], dtype=jnp.int32)[None, None]
    zone = (position >= 0) & (slot >= first) & (slot < stop[:, None, None])
    _, count, cutoffs = sizes(counts, shares, capacity)
    votes = collision_votes(tier_weights(cluster_scores(query), counts, cutoffs), ids)
    cut = candidate_cut(votes, zone, count, cutoffs.shape[2] * ids.shape[3])
    return query, compact(cut, capacity)[0], count
