"""Rotary embedding inside a kernel.

`rotated` and `cosine_sine` compute sine and cosine without the tables and branches of the library functions, which need
many registers. `angles` and `rotated_pair` use the library functions, where registers are not scarce.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

# Pi / 2 in pieces of so few bits that up to 2^20 quarter turns times a piece are exact in float32.
_QUARTER = (1.5, 0.0703125, 0.00048828125, math.pi / 2 - 1.5 - 0.0703125 - 0.00048828125)
# Minimax polynomials on [-pi/4, pi/4] in the square of the angle (S. L. Moshier's Cephes library, sinf.c).
_SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)


def rotated(first: jax.Array, second: jax.Array, angle: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rotate pairs (first, second) [N, D/2] by ``angle`` float32 [N, D/2] in radians; computed in float32, then cast back."""
    cos, sin = cosine_sine(angle)
    a, b = first.astype(jnp.float32), second.astype(jnp.float32)
    return (a * cos - b * sin).astype(first.dtype), (b * cos + a * sin).astype(second.dtype)


def cosine_sine(angle: jax.Array, nearest: Callable[[jax.Array], jax.Array] | None = None) -> tuple[jax.Array, jax.Array]:
    """Compute cosine and sine of float32 radians, with an error of 4e-7 for angles up to a million and a half radians.

    Args:
        angle: float32.
        nearest: rounds to a whole number, in a back end that has no ``floor``.
    """
    # Subtract the nearest whole number of quarter turns, piece by piece, so that no product is rounded.
    turns = angle * (2 / math.pi)
    turns = jnp.floor(turns + 0.5) if nearest is None else nearest(turns)
    rest = angle
    for piece in _QUARTER:
        rest = rest - turns * piece
    square = rest * rest
    sin = rest + rest * square * _polynomial(_SINE, square)
    cos = 1.0 - 0.5 * square + square * square * _polynomial(_COSINE, square)
    # Each quarter turn maps (cos, sin) to (-sin, cos): an odd number exchanges the two, and the signs follow.
    quarter = turns.astype(jnp.int32) & 3
    odd = (quarter & 1) == 1
    cos, sin = jnp.where(odd, sin, cos), jnp.where(odd, cos, sin)
    return jnp.where((quarter == 1) | (quarter == 2), -cos, cos), jnp.where(quarter >= 2, -sin, sin)


def _polynomial(coefficients, x):
    value = coefficients[0]
    for coefficient in coefficients[1:]:
        value = value * x + coefficient
    return value


def angles(place: jax.Array, inv_freq: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute cosine and sine, float32 [N, D/2], of places int32 [N] times ``inv_freq`` float32 [D/2]."""
    angle = place.astype(jnp.float32)[:, None] * inv_freq[None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotated_pair(first: jax.Array, second: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rotate pairs (first, second) float32 [N, D/2] by the angle of ``cos`` and ``sin``."""
    return first * cos - second * sin, second * cos + first * sin
