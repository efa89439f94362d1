"""Product quantisation: vectors are cut into parts, and each part is replaced by the nearest of a few centroids."""

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.store.pqcache.store_ids import nearest

_BLOCK = 4096  # slots compared with the centroids at once, which bounds the memory needed
_EXACT = lax.Precision.HIGHEST


def kmeans(key: Array, used: Array, parts: int, count: int, iterations: int) -> Array:
    """Compute centroids of each head's vectors by Lloyd's iterations, for each part of the channels by itself.

    The first centroids are evenly spaced vectors. A centroid to which no vector belongs stays where it is.

    Args:
        key: [B, H, S, D].
        used: bool [B, H, S], the vectors that count, which are consecutive. Other vectors may hold anything. If fewer count
            than there are centroids, some centroids occur twice.

    Returns:
        float32 [B, H, M, C, D/M].

    Raises:
        ValueError: there are fewer slots than centroids, or D cannot be cut into M parts.
    """
    batch, heads, slots, dim = key.shape
    if slots < count:
        raise ValueError(f"k-means must have at least as many keys as centroids, got {slots} keys and {count} centroids")
    if dim % parts:
        raise ValueError(f"head_dim must be a multiple of the {parts} parts into which keys are cut, got head_dim={dim}")
    total = jnp.sum(used, axis=2, dtype=jnp.int32)[..., None]
    spread = jnp.arange(count, dtype=jnp.int32)[None, None] * total // count
    first = jnp.argmax(used, axis=2).astype(jnp.int32)[..., None] + spread
    start = jnp.take_along_axis(key, first[..., None], axis=2).astype(jnp.float32)
    start = jnp.where((total > 0)[..., None], start, 0)  # an empty slot may hold anything
    start = start.reshape(batch, heads, count, parts, -1).swapaxes(2, 3)
    size = min(_BLOCK, slots)

    def block(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        centroids, sums, members = carry
        at = jnp.minimum(number * size, slots - size)  # the last block overlaps the block before it
        fresh = (at + jnp.arange(size, dtype=jnp.int32))[None, None] >= number * size
        counted = lax.dynamic_slice_in_dim(used, at, size, 2) & fresh
        vectors = jnp.where(counted[..., None], lax.dynamic_slice_in_dim(key, at, size, 2), 0).astype(jnp.float32)
        own = jax.nn.one_hot(nearest(vectors, centroids), count, dtype=jnp.float32)
        own = jnp.where(counted[..., None, None], own, 0)
        split = vectors.reshape(batch, heads, size, parts, -1)
        sums = sums + jnp.einsum("bhnmc,bhnmd->bhmcd", own, split, precision=_EXACT)
        return centroids, sums, members + jnp.sum(own, axis=2)

    def iterate(_: Array, centroids: Array) -> Array:
        carry = centroids, jnp.zeros_like(centroids), jnp.zeros(centroids.shape[:4], jnp.float32)
        _, sums, members = lax.fori_loop(0, -(-slots // size), block, carry)
        members = members[..., None]
        return jnp.where(members > 0, sums / jnp.maximum(members, 1), centroids)

    return lax.fori_loop(0, iterations, iterate, start)
