"""The nearest centroids of keys, and the store of their codes, in plain JAX."""

import functools
import operator

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.formats import bit_codes
from pallas_kernels.host import copy_row


def nearest(key: Array, centroids: Array) -> Array:
    """Find the centroid that is nearest to each part of vectors; of equally near centroids the first.

    Args:
        key: [B, H, N, D].
        centroids: float32 [B, H, M, C, D/M].

    Returns:
        int32 [B, H, N, M].
    """
    parts = key.reshape(*key.shape[:3], centroids.shape[2], -1).astype(jnp.float32)
    product = jnp.einsum("bhnmd,bhmcd->bhnmc", parts, centroids, precision=lax.Precision.HIGHEST)
    norm = jnp.sum(jnp.square(centroids), axis=4)[:, :, None]
    return jnp.argmin(norm - 2 * product, axis=4).astype(jnp.int32)


def code_of(numbers: Array, count: int) -> Array:
    """Join indices of centroids int32 [..., M], below ``count``, to one code int32 [...], the first in the lowest bits."""
    bits = bit_codes.bits_of(count)
    return functools.reduce(operator.or_, (numbers[..., part] << part * bits for part in range(numbers.shape[-1])))


def store_ids(key, active, cursor, centroids, ids, *, rows=None):
    """Store the codes of new tokens, in plain JAX."""
    parts, count = centroids.shape[2:4]
    bits = parts * bit_codes.bits_of(count)
    end = ids.shape[2] * bit_codes.together(bits)[0]
    real = active >= 0
    order = jnp.arange(active.shape[1], dtype=jnp.int32)[None] - jnp.sum(real, axis=1, dtype=jnp.int32)[:, None]
    slot = jnp.where(real, cursor[:, None] + order, end)
    at = jnp.where(real, slot, 0)
    at = at if rows is None else copy_row(at, rows.sinks, key.shape[2])
    new = jnp.take_along_axis(key, at[:, None, :, None], axis=2, mode="clip")
    code = jnp.where(real[:, None], code_of(nearest(new, centroids), count), 0)
    return bit_codes.add(ids, code, slot, bits)
