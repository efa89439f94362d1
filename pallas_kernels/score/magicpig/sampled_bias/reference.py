"""The corrections of sampled tokens in plain JAX."""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.formats.quantised import numbers_at, whole
from pallas_kernels.numerics import product_precision

_SMOOTH = 1e-4  # keeps the correction of the rarest keys finite


def cosine(product: Array, norms: Array) -> Array:
    """Divide the product of two vectors by the product of their norms; 0 where the norms are 0. Kernels use it too."""
    return jnp.where(norms > 0, product / jnp.where(norms > 0, norms, 1.0), 0.0)


def correction(cosine: Array, num_tables: int, num_bits: int) -> Array:
    """Return -log of the chance that a key at this angle is sampled: float32, shaped like ``cosine``. Kernels use it too."""
    angle = lax.acos(jnp.minimum(jnp.maximum(cosine, -1.0), 1.0))
    same = lax.integer_pow(1 - angle / math.pi, num_bits)  # the chance of equal buckets in one table
    others = lax.integer_pow(1 - same, num_tables - 1)
    none, once = (1 - same) * others, num_tables * same * others
    return -jnp.log(1 - none - once + _SMOOTH)


def sampled_bias(query, key, centre, slots, own, near, *, first, num_tables, num_bits):
    """Compute the corrections of the listed slots' logits, in plain JAX."""
    if slots is None:
        key, slots = whole(key), jnp.arange(key.shape[2], dtype=jnp.int32)[None, None]
    else:
        key = numbers_at(key, slots)
    exact: Any = product_precision(key.dtype)
    product = jnp.einsum("bhgd,bhkd->bhgk", query, key, precision=exact, preferred_element_type=jnp.float32)
    product = product - jnp.sum(query.astype(jnp.float32) * centre[:, :, None], axis=3)[..., None]
    norms = _norm(query)[..., None] * _norm(key.astype(jnp.float32) - centre[:, :, None])[:, :, None]
    searched = ((slots >= first) & (slots < near[:, None, None]))[:, :, None]
    bias = jnp.where(searched, correction(cosine(product, norms), num_tables, num_bits), 0.0)
    return jnp.where(own, bias, -jnp.inf)


def _norm(x: Array) -> Array:
    """Compute the norm of vectors [..., D]: float32 [...]."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1))
