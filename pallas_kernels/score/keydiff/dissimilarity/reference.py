"""Minus the cosines with the mean direction, in plain JAX."""

import jax.numpy as jnp

LEAST = 1e-8  # the least norm; smaller norms count as this one


def dissimilarity(key, position):
    """Score each stored key by minus its cosine with the mean direction, in plain JAX."""
    held = position >= 0
    key = jnp.where(held[..., None], key, 0).astype(jnp.float32)
    unit = key / jnp.maximum(jnp.linalg.norm(key, axis=-1, keepdims=True), LEAST)
    count = jnp.sum(held, axis=2, dtype=jnp.int32)[..., None].astype(jnp.float32)
    mean = unit.sum(axis=2) / jnp.maximum(count, 1.0)
    mean = mean / jnp.maximum(jnp.linalg.norm(mean, axis=-1, keepdims=True), LEAST)
    return -jnp.einsum("bhsd,bhd->bhs", unit, mean)
