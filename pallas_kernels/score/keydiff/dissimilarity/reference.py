"""Minus the cosines with the mean direction, in plain JAX."""

import jax.numpy as jnp

LEAST = 1e-8  # the least norm; smaller norms count as this one


def dissimilarity(key, position):
    """Score each stored key by minus its cosine with the mean direction, in plain JAX."""
    held = position >= 0
    # Empty slots are left out of sums, not set to 0 before: that would be another array of all keys.
    key = key.astype(jnp.float32)
    norm = jnp.maximum(jnp.linalg.norm(key, axis=-1, keepdims=True), LEAST)
    count = jnp.sum(held, axis=2, dtype=jnp.int32)[..., None].astype(jnp.float32)
    mean = jnp.sum(jnp.where(held[..., None], key / norm, 0), axis=2) / jnp.maximum(count, 1.0)
    mean = mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), LEAST)
    # A sum, not a product of matrices, which would need the directions as an array.
    return jnp.where(held, -jnp.sum(key * mean[:, :, None], axis=-1) / norm[..., 0], 0)
