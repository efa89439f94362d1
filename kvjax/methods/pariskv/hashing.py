"""Sign-pattern hashing of keys: rotation, codes, rank votes, the candidate cut and the 4-bit estimate of q.k.

These are pure functions for methods that search keys by votes (ParisKV). A vector of D channels has N = D/8 *slices* of 8
channels. The signs of a slice are its *cluster*, one of 256. Only the length of a slice depends on scale, so vectors are
rotated without the factor 1/sqrt(D) and not divided by their norm. So sums of integers stay exact, and ties and zeros
do too.

This module has the parts in plain JAX. A decode step runs operations that combine these parts and have kernels:
`pallas_kernels.store.pariskv.encode` and `pallas_kernels.choose.pariskv.choice`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.protocol.typing import pytree
from pallas_kernels.choose.pariskv.collision.votes import (
    MILLION,
    candidate_cut,
    cluster_scores,
    collision_votes,
    portion,
    tier_weights,
)
from pallas_kernels.formats.key_codes import CLUSTERS, SLICE, cluster_counts, codes, estimate, rotation
from pallas_kernels.numerics import drawn

__all__ = [
    "CLUSTERS", "SLICE", "TIERS", "Codes", "candidate_cut", "cluster_counts", "cluster_scores", "collision_votes", "encode",
    "estimate", "most_of", "parts_of", "random_signs", "rotation", "rotation_scale", "share_of", "tier_weights",
]  # fmt: skip

TIERS = (0.05, 0.15, 0.30, 0.50, 0.75, 1.0)  # a cluster gets a vote for each share of the covered keys in which it begins


@pytree
class Codes:
    """Stored codes of vectors [..., D]: 5 bits per channel and a weight per slice; see `store.pariskv.encode`."""

    ids: Array  # uint8 [..., N]
    magnitudes: Array  # uint8 [..., D/2]
    weight: Array  # bfloat16 [..., N]


def random_signs(seed: Array | int, dim: int) -> Array:
    """Draw the random part of the rotation: float32 [D], each -1 or 1."""
    return drawn(lambda key: jax.random.rademacher(key, (dim,), jnp.float32), seed)


def encode(rotated: Array, scale: float) -> Codes:
    """Encode rotated vectors float32 [..., D]; ``scale`` is the missing factor 1/sqrt(D), or 1 without a rotation."""
    ids, magnitudes, weight = codes(rotated, scale)
    return Codes(ids=ids, magnitudes=magnitudes, weight=weight)


def parts_of(share: Array | np.ndarray) -> Array | np.ndarray:
    """Convert shares float32 in 0..1 to a number of millionths, rounded: int32, a NumPy array for a NumPy array."""
    million = np.float32(MILLION)
    if isinstance(share, np.ndarray):
        return np.round(share * million).astype(np.int32)
    return jnp.round(share * million).astype(jnp.int32)


def share_of(share: Array, count: Array) -> Array:
    """Compute ceil(share * count): ``share`` float32 in 0..1, rounded to millionths, ``count`` int32 below 2.1 million."""
    share, count = jnp.broadcast_arrays(parts_of(share), count)
    return portion(share, count)


def most_of(share: float, count: int) -> int:
    """Compute `share_of` for plain numbers."""
    return -(-round(share * MILLION) * count // MILLION)


def rotation_scale(dim: int) -> float:
    """Compute the factor 1/sqrt(D) that `rotation` leaves out."""
    return 1 / math.sqrt(dim)
