"""The steps of collision voting in plain JAX: sort the clusters, look up the votes, find the cut by an integer histogram."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.formats.key_codes import CLUSTERS, SLICE

MILLION = 1_000_000


def portion(part: Array, count: Array) -> Array:
    """Compute ceil(part * count / 1,000,000) of int32 >= 0; ``part`` is at most a million, ``count`` below 2.1 million.

    It is computed in integers, because the float32 product of, say, 0.3 and 7,000 need not be 2,100.
    """
    whole = lax.div(count, 1000) * part
    rest = lax.rem(whole, 1000) * 1000 + lax.rem(count, 1000) * part
    return lax.div(whole, 1000) + lax.div(rest + (MILLION - 1), MILLION)


def cluster_scores(query: Array) -> Array:
    """Multiply each slice with each cluster's sign vector: rotated query float32 [..., D] to float32 [..., N, 256]."""
    slices = query.reshape(*query.shape[:-1], -1, SLICE)
    scores = jnp.zeros((*slices.shape[:-1], 1), jnp.float32)
    for channel in range(SLICE):
        y = slices[..., channel : channel + 1]
        scores = jnp.concatenate([scores - y, scores + y], axis=-1)
    return scores


def tier_weights(scores: Array, counts: Array, cutoffs: Array) -> Array:
    """Count the votes for a key of each cluster: the tiers in which its cluster begins, from the best cluster on.

    Args:
        scores: float32 [B, H, N, 256].
        counts: int32 [B, H, N, 256], keys in each cluster.
        cutoffs: int32 [B, H, Z], how many keys each tier covers.

    Returns:
        int32 [B, H, N, 256] in 0..Z. A cluster that lies across a cut-off gets the better tier as a whole.
    """
    cluster = lax.broadcasted_iota(jnp.int32, counts.shape, 3)
    _, ranked, order = lax.sort((-scores, counts, cluster), dimension=3, is_stable=True, num_keys=1)
    before = jnp.cumsum(ranked, axis=3) - ranked
    tiers = jnp.sum(before[..., None] < cutoffs[:, :, None, None], axis=-1, dtype=jnp.int32)
    _, weight = lax.sort((order, tiers), dimension=3, is_stable=True, num_keys=1)
    return weight


def collision_votes(weights: Array, ids: Array) -> Array:
    """Sum over slices of the votes of a key's clusters: weights int32 [B, H, N, 256], ids [B, H, S, N] to int32 [B, H, S]."""
    batch, heads, keys, slices = ids.shape
    base = jnp.arange(slices, dtype=jnp.int32).reshape(1, 1, 1, slices) * CLUSTERS
    index = (ids.astype(jnp.int32) + base).reshape(batch, heads, keys * slices)
    found = jnp.take_along_axis(weights.reshape(batch, heads, slices * CLUSTERS), index, axis=2, mode="clip")
    return jnp.sum(found.reshape(ids.shape), axis=3, dtype=jnp.int32)


def candidate_cut(votes: Array, valid: Array, count: Array, most: int) -> Array:
    """Mark the ``count`` valid slots with most votes, lower slots first among equal votes, by a histogram without a sort.

    Args:
        votes: int32 [B, H, S] in 0..most.
        valid: bool [B, H, S].
        count: int32 [B, H], at most the number of valid slots.
        most: largest possible vote.

    Returns:
        bool [B, H, S], ``count`` of them true.
    """
    votes = jnp.where(valid, votes, -1)
    values = jnp.arange(most + 1, dtype=jnp.int32).reshape(1, 1, 1, -1)
    reach = jnp.sum(votes[..., None] >= values, axis=2, dtype=jnp.int32)  # slots with at least each number of votes
    enough = jnp.sum(reach >= count[..., None], axis=2, dtype=jnp.int32)
    threshold = jnp.maximum(enough - 1, 0)[..., None]
    above = votes > threshold
    level = votes == threshold
    left = count - jnp.sum(above, axis=2, dtype=jnp.int32)
    return above | (level & (jnp.cumsum(level, axis=2, dtype=jnp.int32) <= left[..., None]))


def sizes(counts: Array, shares: Array, capacity: int) -> tuple[Array, Array, Array]:
    """Compute the keys in the zone and the candidates, int32 [B, H], and the tiers' cut-offs in keys, int32 [B, H, Z]."""
    zone = jnp.sum(counts[:, :, 0], axis=2, dtype=jnp.int32)
    piece = jnp.sum(zone[..., None] >= shares[None, None, :-1, 0], axis=2, dtype=jnp.int32)
    row = jnp.take(shares, piece, axis=0, mode="clip")
    candidates = jnp.minimum(portion(row[..., 1], zone), capacity)
    return zone, candidates, portion(row[..., 2:], jnp.broadcast_to(zone[..., None], row[..., 2:].shape))
