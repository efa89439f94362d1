"""Collision votes in plain JAX: sort the clusters, look up the votes, find the cut by an integer histogram."""

import jax.numpy as jnp

from pallas_kernels.choose.compact import compact
from pallas_kernels.choose.pariskv.collision.votes import candidate_cut, cluster_scores, collision_votes, sizes, tier_weights
from pallas_kernels.formats.key_codes import rotation


def collision(query, signs, counts, ids, position, stop, shares, *, first, capacity, part=None):
    """List the keys of the zone with the most votes, in plain JAX."""
    if part is not None:
        first, stop = part.zone(first, stop, ids.shape[2])
    query = query.astype(jnp.float32).mean(axis=2)
    query = query if signs is None else rotation(query, signs)
    slot = jnp.arange(ids.shape[2], dtype=jnp.int32)[None, None]
    zone = (position >= 0) & (slot >= first) & (slot < stop[:, None, None])
    _, count, cutoffs = sizes(counts, shares, capacity)
    votes = collision_votes(tier_weights(cluster_scores(query), counts, cutoffs), ids)
    most = cutoffs.shape[2] * ids.shape[3]
    if part is not None:
        cut, count = _cut_of_part(jnp.where(zone, votes, -1), count, most, part)
        return query, compact(cut, min(capacity, ids.shape[2]))[0], count
    cut = candidate_cut(votes, zone, count, most)
    return query, compact(cut, capacity)[0], count


def _cut_of_part(votes, wanted, most, part):
    """Cut over all parts as `votes.candidate_cut`: bool [B, H, S], this part's candidates, and their number int32 [B, H].

    ``votes`` int32 [B, H, S] are in 0..``most``, and -1 outside of the zone.
    """
    values = jnp.arange(most + 1, dtype=jnp.int32).reshape(1, 1, 1, -1)
    own = jnp.sum(votes[..., None] >= values, axis=2, dtype=jnp.int32)  # slots with at least each number of votes
    _, cut, left, count = part.share_out(own, wanted)
    tied = votes == cut[..., None]
    return (votes > cut[..., None]) | (tied & (jnp.cumsum(tied, axis=2, dtype=jnp.int32) <= left[..., None])), count
