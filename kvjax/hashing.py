"""Sign-pattern hashing of keys: rotation, codes, rank votes, the candidate cut and the 4-bit estimate of q.k.

Pure functions for methods that search keys by votes (ParisKV). A vector of D channels is N = D/8 *slices* of 8; the signs of
a slice are its *cluster*, one of 256. Everything about a slice but its length is free of scale, so vectors are rotated
without the factor 1/sqrt(D) and never divided by their norm: sums of whole numbers stay exact, and so do ties and zeros.

Codes of a vector do not depend on how many others are encoded with it, to the last bit: additions run in a fixed order, and
where a product is added, it is exact, so that it does not matter whether a compiler fuses the two.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from kvjax.typing import pytree

SLICE = 8  # channels per slice; with 8 the cluster is one byte
CLUSTERS = 1 << SLICE
THRESHOLDS = (
    0.0843,
    0.1698,
    0.2578,
    0.3499,
    0.4487,
    0.5585,
    0.6901,
)  # of |u_j|, u uniform on the sphere in 8 dimensions
LEVELS = (420, 1266, 2130, 3025, 3973, 5001, 6169, 7633)  # times LEVEL: whole numbers, which products keep exact
LEVEL = 1e-4
TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)  # a cluster scores one vote for each share of the covered keys it begins in
_MILLION = 1_000_000


@pytree
class Codes:
    """What is stored of vectors [..., D]: 7 bits a channel and a weight per slice."""

    ids: Array  # uint8 [..., N], cluster of each slice: bit j is set where channel j is >= 0
    magnitudes: (
        Array  # uint8 [..., D/2], two channels, the even one in the low bits: bit 3 sign (1 is >= 0), bits 0-2 level
    )
    weight: Array  # bfloat16 [..., N], length of the slice over the length of its decoded direction's projection on it


def random_signs(seed: Array | int, dim: int) -> Array:
    """The rotation's random part: float32 [D] of -1 and 1."""
    return jax.random.rademacher(jax.random.key(seed), (dim,), jnp.float32)


def rotation(x: Array, signs: Array) -> Array:
    """Randomized Hadamard transform without its factor 1/sqrt(D): [..., D] in any float dtype to float32 [..., D].

    Butterfly additions, log2(D) rounds: unlike a matrix product, the order does not depend on the shape.
    """
    dim = x.shape[-1]
    out = x.astype(jnp.float32) * signs.reshape((1,) * (x.ndim - 1) + (dim,))
    half = 1
    while half < dim:
        pairs = out.reshape(*x.shape[:-1], dim // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        out = jnp.stack([first + second, first - second], axis=-2).reshape(x.shape)
        half *= 2
    return out


def encode(rotated: Array, scale: float) -> Codes:
    """Codes of rotated vectors float32 [..., D]; ``scale`` is the rotation's missing factor (1/sqrt(D), or 1 without one)."""
    lead, dim = rotated.shape[:-1], rotated.shape[-1]
    y = rotated.reshape(*lead, dim // SLICE, SLICE)
    parts = _parts(y)
    radius = jnp.sqrt(_exact_dot(parts, parts))
    size = jnp.abs(y) / jnp.maximum(radius, 1e-8)[..., None]  # |u_j|
    above = [size > threshold for threshold in THRESHOLDS]
    rank = sum(x.astype(jnp.int32) for x in above)
    level = LEVELS[0] + sum(
        jnp.where(x, float(high - low), 0.0) for x, low, high in zip(above, LEVELS, LEVELS[1:], strict=False)
    )
    alpha = jnp.maximum(_exact_dot((level,), _parts(size)), 1e-6 / LEVEL)
    positive = (y >= 0).astype(jnp.int32)
    bits = jnp.arange(SLICE, dtype=jnp.int32).reshape((1,) * (y.ndim - 1) + (SLICE,))
    ids = jnp.sum(positive << bits, axis=-1, dtype=jnp.int32)
    nibbles = (rank | positive << 3).reshape(*lead, dim // 2, 2)
    return Codes(
        ids=ids.astype(jnp.uint8),
        magnitudes=(nibbles[..., 0] | nibbles[..., 1] << 4).astype(jnp.uint8),
        weight=(radius * (scale / LEVEL) / alpha).astype(jnp.bfloat16),
    )


def estimate(query: Array, magnitudes: Array, weight: Array, scale: float) -> Array:
    """Estimated q.k from codes.

    Args:
        query: float32 [B, H, D], rotated.
        magnitudes: uint8 [B, H, K, D/2], of K keys.
        weight: bfloat16 [B, H, K, N].
        scale: as in `encode`.

    Returns:
        float32 [B, H, K].
    """
    batch, heads, keys, _ = magnitudes.shape
    slices = weight.shape[-1]
    nibbles = jnp.stack([magnitudes & 15, magnitudes >> 4], axis=-1).astype(jnp.int32)
    signed = np.array([-level for level in LEVELS] + list(LEVELS), np.float32)
    direction = jnp.take(jnp.asarray(signed), nibbles, mode="clip").reshape(batch, heads, keys, slices, SLICE)
    dots = jnp.sum(direction * query.reshape(batch, heads, 1, slices, SLICE), axis=-1)
    total = jnp.sum(dots * weight.astype(jnp.float32), axis=-1) * (scale * LEVEL)
    return jnp.where(total == 0, 0.0, total)  # -0 would lose a tie against 0


def cluster_scores(query: Array) -> Array:
    """Product of each slice with the sign vector of each cluster: rotated float32 [..., D] to float32 [..., N, 256]."""
    slices = query.reshape(*query.shape[:-1], -1, SLICE)
    scores = jnp.zeros((*slices.shape[:-1], 1), jnp.float32)
    for channel in range(SLICE):
        y = slices[..., channel : channel + 1]
        scores = jnp.concatenate([scores - y, scores + y], axis=-1)
    return scores


def tier_weights(scores: Array, counts: Array, cutoffs: Array) -> Array:
    """Votes a key of each cluster gets: the number of tiers its cluster begins in, best cluster first.

    Args:
        scores: float32 [B, H, N, 256].
        counts: int32 [B, H, N, 256], keys in each cluster.
        cutoffs: int32 [B, H, Z], keys each tier covers.

    Returns:
        int32 [B, H, N, 256] in 0..Z. A cluster across a cut-off gets the better tier as a whole.
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
    """The ``count`` valid slots with most votes, the lower slot among equals: an integer histogram, no sort.

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


def histogram(ids: Array, live: Array) -> Array:
    """Keys in each cluster: ids uint8 [B, H, S, N], those ``live`` bool [B, H, S] counted, to int32 [B, H, N, 256]."""
    batch, heads, keys, slices = ids.shape
    b, h, n = (
        jnp.arange(size).reshape([-1 if axis == at else 1 for axis in range(4)])
        for at, size in ((0, batch), (1, heads), (3, slices))
    )
    empty = jnp.zeros((batch, heads, slices, CLUSTERS), jnp.int32)
    return empty.at[b, h, n, ids.astype(jnp.int32)].add(live.astype(jnp.int32)[..., None])


def share_of(share: Array, count: Array) -> Array:
    """ceil(share * count) with ``share`` float32 in 0..1 taken to the nearest millionth; ``count`` int32 below 2.1 million.

    In whole numbers, because the float32 product of, say, 0.3 and 7,000 need not be 2,100.
    """
    part = jnp.round(share * _MILLION).astype(jnp.int32)
    whole = (count // 1000) * part
    rest = (whole % 1000) * 1000 + (count % 1000) * part
    return whole // 1000 + (rest + (_MILLION - 1)) // _MILLION


def most_of(share: float, count: int) -> int:
    """`share_of` of plain numbers."""
    return -(-round(share * _MILLION) * count // _MILLION)


def rotation_scale(dim: int) -> float:
    """The factor that `rotation` leaves out."""
    return 1 / math.sqrt(dim)


def _parts(x: Array) -> tuple[Array, Array, Array]:
    """Three float32 of 8 significant bits each that add up to ``x``, so that products of parts are exact."""
    high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    rest = x - high
    middle = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
    return high, middle, rest - middle


def _exact_dot(a: tuple[Array, ...], b: tuple[Array, ...]) -> Array:
    """Inner product over the last axis (a power of two long) of sums of `_parts`, the small products first."""
    total = jnp.zeros_like(b[0])
    for x in reversed(a):
        for y in reversed(b):
            total = total + x * y
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]
