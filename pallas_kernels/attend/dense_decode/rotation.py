"""Rotary embedding of stored keys at places relative to a query."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attend.gather_attention.reference import rotate_rows
from pallas_kernels.formats.quantised import Quantised, whole


class Rotation(NamedTuple):
    """How stored keys are rotated: each by its token's position minus an origin, then rounded to the keys' dtype.

    Pairs are (i, i + E/2), and angles float32.
    """

    inv_freq: jax.Array  # float32 [E/2], radians per position
    origin: jax.Array  # int32 [B, 2]: the origin of tokens before position `first`, and of all other tokens
    first: int


def rotated_keys(key: jax.Array | Quantised, position: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotate the keys [B, H, S, E] of tokens at ``position`` int32 [B, H, S]."""
    before, behind = (rotation.origin[:, i, None, None] for i in (0, 1))
    place = position - jnp.where(position < rotation.first, before, behind)
    return rotate_rows(whole(key), place, rotation.inv_freq)
