"""Sign-pattern hashing of keys: rotation, codes, rank votes, the candidate cut and the 4-bit estimate of q.k.

Pure functions for methods that search keys by votes (ParisKV). A vector of D channels is N = D/8 *slices* of 8; the signs of
a slice are its *cluster*, one of 256. Everything about a slice but its length is free of scale, so vectors are rotated
without the factor 1/sqrt(D) and never divided by their norm: sums of whole numbers stay exact, and so do ties and zeros.

These are the parts in plain JAX. What runs in a decode step are the operations made of them, which have kernels:
`pallas_kernels.encode`, `pallas_kernels.collision` and `pallas_kernels.rerank`.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.typing import pytree
from pallas_kernels.collision.votes import (
    MILLION,
    candidate_cut,
    cluster_scores,
    collision_votes,
    portion,
    tier_weights,
)
from pallas_kernels.formats.key_codes import (
    CLUSTERS,
    LEVEL,
    LEVELS,
    SLICE,
    THRESHOLDS,
    cluster_counts,
    codes,
    estimate,
    rotation,
)

__all__ = [
    "CLUSTERS",
    "LEVEL",
    "LEVELS",
    "SLICE",
    "THRESHOLDS",
    "TIERS",
    "Codes",
    "candidate_cut",
    "cluster_counts",
    "cluster_scores",
    "collision_votes",
    "encode",
    "estimate",
    "most_of",
    "parts_of",
    "random_signs",
    "rotation",
    "rotation_scale",
    "share_of",
    "tier_weights",
]

TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)  # a cluster scores one vote for each share of the covered keys it begins in


@pytree
class Codes:
    """What is stored of vectors [..., D]: 7 bits a channel and a weight per slice; see `pallas_kernels.encode.encode`."""

    ids: Array  # uint8 [..., N]
    magnitudes: Array  # uint8 [..., D/2]
    weight: Array  # bfloat16 [..., N]


def random_signs(seed: Array | int, dim: int) -> Array:
    """The rotation's random part: float32 [D] of -1 and 1."""
    return jax.random.rademacher(jax.random.key(seed), (dim,), jnp.float32)


def encode(rotated: Array, scale: float) -> Codes:
    """Codes of rotated vectors float32 [..., D]; ``scale`` is the rotation's missing factor (1/sqrt(D), or 1 without one)."""
    ids, magnitudes, weight = codes(rotated, scale)
    return Codes(ids=ids, magnitudes=magnitudes, weight=weight)


def parts_of(share: Array | np.ndarray) -> Array | np.ndarray:
    """Shares float32 in 0..1 to the nearest millionth: int32, of NumPy for an array of NumPy."""
    million = np.float32(MILLION)
    if isinstance(share, np.ndarray):
        return np.round(share * million).astype(np.int32)
    return jnp.round(share * million).astype(jnp.int32)


def share_of(share: Array, count: Array) -> Array:
    """ceil(share * count), ``share`` float32 in 0..1 to the nearest millionth, ``count`` int32 below 2.1 million."""
    share, count = jnp.broadcast_arrays(parts_of(share), count)
    return portion(share, count)


def most_of(share: float, count: int) -> int:
    """`share_of` of plain numbers."""
    return -(-round(share * MILLION) * count // MILLION)


def rotation_scale(dim: int) -> float:
    """The factor that `rotation` leaves out."""
    return 1 / math.sqrt(dim)
