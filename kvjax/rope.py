"""Rotary position embedding: frequencies and rotation, with angles in float32.

Positions reach 10^5 and more, and in bfloat16 neighbouring positions would share an angle. So all arithmetic is in float32,
and only the rotated vector is cast back to its dtype.

Source: RoFormer (arXiv:2104.09864); layout and the ``llama3`` frequency rule as in Llama 3.1's reference settings.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def inverse_frequencies(head_dim: int, theta: float, scaling: Any = None) -> np.ndarray:
    """The angle per position of each rotated pair, in radians: float32 [D/2].

    Args:
        head_dim: size D of a head, an even number.
        theta: base of the frequencies.
        scaling: None, or an object with ``factor``, ``low_freq_factor``, ``high_freq_factor`` and
            ``original_max_position_embeddings`` (tokens) for the llama3 rule: slow frequencies are divided by ``factor``,
            fast frequencies stay, and those between are interpolated.

    Raises:
        ValueError: ``head_dim`` is odd.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for RoPE, got {head_dim}")
    frequency = 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is not None:
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)  # rotations within the old context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        frequency = frequency * (keep + (1.0 - keep) / scaling.factor)
    return frequency.astype(np.float32)


def rotate(x: jax.Array, position: jax.Array, inv_freq: jax.Array | np.ndarray) -> jax.Array:
    """Rotate the last axis of ``x`` by its position. Channels ``i`` and ``i + D/2`` form a pair (halves layout).

    Args:
        x: [..., T, D].
        position: int32 [..., T]; its leading axes must broadcast against those of ``x``.
        inv_freq: float32 [D/2].

    Returns:
        The rotated array in ``x``'s shape and dtype.
    """
    angle = position[..., None].astype(jnp.float32) * jnp.asarray(inv_freq).reshape((1,) * position.ndim + (-1,))
    cos, sin = (f(angle).reshape((1,) * (x.ndim - angle.ndim) + angle.shape) for f in (jnp.cos, jnp.sin))
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return out.astype(x.dtype)
