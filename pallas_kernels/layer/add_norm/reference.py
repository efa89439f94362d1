"""The sum of two arrays and its norm, in plain JAX."""

import jax.numpy as jnp
from jax import lax


def rms_norm(x, scale, eps):
    """Normalise ``x`` [..., D] by its root mean square, times ``scale`` [D] or [N, D]: in float32, cast back to its dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32).reshape((1,) * (x.ndim - scale.ndim) + scale.shape)).astype(x.dtype)


def add_norm(x, update, scale, eps):
    """Add an update, and normalise the sum, in plain JAX."""
    x = x + update
    return x, rms_norm(x, scale, eps)
