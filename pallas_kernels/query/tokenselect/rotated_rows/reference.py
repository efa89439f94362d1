"""Listed rows, gathered and rotated in plain JAX."""

import jax.numpy as jnp

from pallas_kernels.formats.quantised import numbers_at
from pallas_kernels.numerics import rotate_halves


def rotated_rows(key, value, token, inv_freq):
    """Gather listed keys and values, and rotate the keys, in plain JAX."""
    key, value = (numbers_at(x, token[:, None]) for x in (key, value))
    angle = jnp.arange(token.shape[1], dtype=jnp.float32)[:, None] * inv_freq[None]
    return rotate_halves(key, angle[None, None]).astype(key.dtype), value
