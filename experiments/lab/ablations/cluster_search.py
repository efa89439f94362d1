"""Searches the largest q.k by cluster votes, with analytic or learned clusters, and measures recall of the exact answer.

Axes: L layers (the hashing functions' batch), H KV heads, T tokens, D head_dim, N = D/8 slices.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.methods.pariskv import hashing
from kvjax.protocol.typing import Model, attention_soft_cap, layer_ropes, layer_windows, pytree
from kvjax.rope import frequencies, prepare, rotate
from pallas_kernels.attend.causal_attention import causal_attention
from pallas_kernels.soft_cap import soft_cap

KMEANS_STEPS = 25


@pytree
class Clusters:
    """The cluster of each slice of every key, and the scores of the clusters for some queries."""

    ids: Array  # uint8 [L, H, T, N]
    scores: Array  # float32 [L, H, C, N, 256], product of each of C queries with the centre of every cluster


@functools.partial(jax.jit, static_argnames="config")
def capture(params: Any, tokens: Array, at: Array, *, config: Model) -> tuple[Array, Array]:
    """Collect the queries and keys of a teacher-forced pass over a text.

    Args:
        params: model parameters.
        tokens: int32 [T], the text.
        at: int32 [C], positions of the wanted queries.
        config: the model's description.

    Returns:
        The rotated mean query of each group, float32 [L, H, C, D], and the rotated keys, float32 [L, H, T, D].
    """
    position, windows, ropes = jnp.arange(tokens.shape[0], dtype=jnp.int32), layer_windows(config), layer_ropes(config)
    length = jnp.full((1,), tokens.shape[0], jnp.int32)

    def attend(layer: int, state: None, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
        inv_freq = jnp.asarray(frequencies(ropes[layer], config.head_dim))
        q, k = prepare(q, k, position[None], length, ropes[layer])
        q, k = rotate(q, position, inv_freq), rotate(k, position, inv_freq)
        mean = q[0][:, :, at].astype(jnp.float32).mean(axis=1)
        return causal_attention(q, k, v, window=windows[layer]), (mean, k[0].astype(jnp.float32))

    last = jnp.full((1,), tokens.shape[0] - 1, jnp.int32)
    with soft_cap(attention_soft_cap(config)):
        _, states = config.apply(params, tokens[None], attend, (None,) * config.num_layers, last=last)
    return jnp.stack([state[0] for state in states]), jnp.stack([state[1] for state in states])


@functools.partial(jax.jit, static_argnames="rotated")
def sign_clusters(keys: Array, queries: Array, *, rotated: bool) -> tuple[Clusters, hashing.Codes, Array]:
    """Compute ParisKV's clusters and codes of the keys, and the queries in the form that ParisKV's estimate takes."""
    if rotated:
        signs = hashing.random_signs(42, keys.shape[-1])
        keys, queries = hashing.rotation(keys, signs), hashing.rotation(queries, signs)
    codes = hashing.encode(keys, hashing.rotation_scale(keys.shape[-1]) if rotated else 1.0)
    return Clusters(ids=codes.ids, scores=hashing.cluster_scores(queries)), codes, queries


@jax.jit
def rotated_directions(keys: Array, queries: Array) -> tuple[Array, Array]:
    """Normalise the keys to length 1, and rotate keys and queries as ParisKV does."""
    signs = hashing.random_signs(42, keys.shape[-1])
    directions = keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-8)
    return hashing.rotation(directions, signs), hashing.rotation(queries, signs)


@jax.jit
def learned_clusters(keys: Array, queries: Array, count: Array) -> Clusters:
    """Fit k-means clusters of each slice on the first ``count`` keys; every key belongs to the nearest centre.

    Args:
        keys: float32 [L, H, T, D].
        queries: float32 [L, H, C, D].
        count: int32, number of keys to fit on. Evenly spaced keys among these are the first centres.
    """
    layers, heads, tokens, dim = keys.shape
    slices = keys.reshape(layers, heads, tokens, dim // hashing.SLICE, hashing.SLICE)
    used = (jnp.arange(tokens) < count).astype(jnp.float32)
    start = jnp.arange(hashing.CLUSTERS, dtype=jnp.int32) * count // hashing.CLUSTERS

    def fit(points: Array) -> tuple[Array, Array]:
        def nearest(centres: Array) -> Array:
            near = jnp.sum(centres**2, axis=1)[None] - 2 * jnp.dot(points, centres.T, precision=lax.Precision.HIGHEST)
            return jnp.argmin(near, axis=1)

        def step(_: Array, centres: Array) -> Array:
            ids = nearest(centres)
            size = jnp.zeros(hashing.CLUSTERS, jnp.float32).at[ids].add(used)
            total = jnp.zeros_like(centres).at[ids].add(points * used[:, None])
            return jnp.where(size[:, None] > 0, total / jnp.maximum(size, 1)[:, None], centres)

        centres = lax.fori_loop(0, KMEANS_STEPS, step, points[start])
        return centres, nearest(centres).astype(jnp.uint8)

    # One head after the other, because the distances of all tokens to all centres take much memory.
    points = slices.transpose(0, 1, 3, 2, 4).reshape(-1, tokens, hashing.SLICE)
    centres, ids = lax.map(fit, points)
    centres = centres.reshape(layers, heads, -1, hashing.CLUSTERS, hashing.SLICE)
    asked = queries.reshape(*queries.shape[:3], -1, hashing.SLICE)
    return Clusters(
        ids=ids.reshape(layers, heads, -1, tokens).swapaxes(2, 3),
        scores=jnp.einsum("lhcnd,lhnkd->lhcnk", asked, centres, precision=lax.Precision.HIGHEST),
    )


@functools.partial(jax.jit, static_argnames=("k", "num_sink", "num_local"))
def exact_best(keys: Array, query: Array, stored: Array, *, k: int, num_sink: int, num_local: int) -> Array:
    """Mark the k keys of the retrieval zone with the largest q.k: bool [L, H, T]; ``stored`` int32 tokens are stored."""
    scores = jnp.einsum("lhd,lhtd->lht", query, keys, precision=lax.Precision.HIGHEST)
    return _best(scores, _zone(keys, stored, num_sink, num_local), k)


@functools.partial(jax.jit, static_argnames=("k", "num_sink", "num_local"))
def recall(
    clusters: Clusters,
    codes: hashing.Codes,
    query: Array,
    scale: Array,
    best: Array,
    stored: Array,
    which: Array,
    rho: Array,
    beta: Array,
    *,
    k: int,
    num_sink: int,
    num_local: int,
) -> tuple[Array, Array]:
    """Measure the shares of ``best`` among the candidates, and among the k candidates that the 4-bit estimate ranks first.

    Args:
        clusters: the clusters that vote.
        codes: the codes that the estimate reads.
        query: float32 [L, H, D], in the form that the codes' estimate takes.
        scale: the codes' factor, see `kvjax.methods.pariskv.hashing.encode`.
        best: bool [L, H, T], see `exact_best`.
        stored: int32, number of stored tokens.
        which: int32, index of the query in `clusters`.
        rho: share of the zone's keys that get votes, per slice.
        beta: share of the zone that becomes candidates.
        k: keys to find.
        num_sink: tokens before the zone.
        num_local: tokens behind the zone.

    Returns:
        Both shares, float32 [L, H].
    """
    zone = _zone(best, stored, num_sink, num_local)
    size = jnp.sum(zone, axis=2, dtype=jnp.int32)
    tiers = rho * jnp.asarray(hashing.TIERS, jnp.float32)[None, None]
    cutoffs = hashing.share_of(tiers, size[..., None])
    weights = hashing.tier_weights(clusters.scores[:, :, which], hashing.cluster_counts(clusters.ids, zone), cutoffs)
    votes = hashing.collision_votes(weights, clusters.ids)
    most = len(hashing.TIERS) * clusters.ids.shape[3]
    cut = hashing.candidate_cut(votes, zone, hashing.share_of(beta[None, None], size), most)
    final = _best(hashing.estimate(query, codes.magnitudes, codes.weight, scale), cut, k)
    return tuple(jnp.sum(best & kept, axis=2).astype(jnp.float32) / k for kept in (cut, final))


def _zone(like: Array, stored: Array, num_sink: int, num_local: int) -> Array:
    """Mark the slots of the retrieval zone: bool, in the shape of the first three axes of ``like``."""
    slot = jnp.arange(like.shape[2], dtype=jnp.int32)
    return jnp.broadcast_to(((slot >= num_sink) & (slot < stored - num_local))[None, None], like.shape[:3])


def _best(scores: Array, among: Array, k: int) -> Array:
    """Mark the k largest ``scores`` [L, H, T] among the entries where ``among`` is true: bool [L, H, T]."""
    value, index = lax.top_k(jnp.where(among, scores, -jnp.inf), k)
    layer, head = jnp.arange(scores.shape[0])[:, None, None], jnp.arange(scores.shape[1])[None, :, None]
    return jnp.zeros(scores.shape, bool).at[layer, head, index].set(value > -jnp.inf)
