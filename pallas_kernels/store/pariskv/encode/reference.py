"""4-bit codes of keys in plain JAX."""

import jax.numpy as jnp

from pallas_kernels.formats.key_codes import codes, rotation, rows


def encode(key, valid, signs, *, scale):
    """Encode vectors in 4 bits per channel, in plain JAX."""
    mask = valid[..., None]
    key = jnp.where(mask, key, 0).astype(jnp.float32)
    ids, magnitudes, weight = codes(key if signs is None else rotation(key, signs), scale)
    return tuple(jnp.where(mask, x, jnp.zeros_like(x)) for x in (ids, rows(magnitudes, weight)))
