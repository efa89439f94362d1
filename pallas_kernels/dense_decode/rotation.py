"""Rotary embedding of stored keys at places relative to a query."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.formats.quantised import Quantised, whole
from pallas_kernels.numerics import rotate_halves


class Rotation(NamedTuple):
    """Each key is rotated by its token's position minus an origin, and rounded to the dtype of the keys.

    Pairs are (i, i + E/2), and angles float32.
    """

    inv_freq: jax.Array  # float32 [E/2], radians per position
    origin: jax.Array  # int32 [B, 2]: of tokens before position `first`, and of the other tokens
    first: int


def rotated_keys(key: jax.Array | Quantised, position: jax.Array, rotation: Rotation) -> jax.Array:
    """The keys [B, H, S, E] of tokens at ``position`` int32 [B, H, S], rotated."""
    before, behind = (rotation.origin[:, i, None, None] for i in (0, 1))
    place = position - jnp.where(position < rotation.first, before, behind)
    numbers = whole(key)
    angle = place[..., None].astype(jnp.float32) * rotation.inv_freq[None, None, None]
    return rotate_halves(numbers, angle).astype(numbers.dtype)
