"""Clusters by inner product: spherical k-means, whose centroids have length 1 while it goes on, and sums over clusters."""

import jax.numpy as jnp
from jax import Array, lax

_PRODUCTS = 1 << 21  # the most products of keys with centroids that a head holds at once
_EQUAL = 1e-5  # values that differ by less than this share of the largest are equal, so that rounding decides nothing


def mean_key(key: Array, used: Array) -> Array:
    """Average the ``used`` bool [B, N] of keys [B, H, N, D], which hold anything elsewhere: float32 [B, H, 1, D]."""
    count = jnp.maximum(jnp.sum(used, axis=1, dtype=jnp.float32), 1)[:, None, None, None]
    return jnp.sum(jnp.where(used[:, None, :, None], key, 0), axis=2, keepdims=True, dtype=jnp.float32) / count


def centroids_of(key: Array, mean: Array, used: Array, count: Array, most: int, rounds: int) -> Array:
    """Compute centroids of each head's keys. They begin at evenly spaced keys; a centroid without keys stays as it is.

    Args:
        key: [B, H, N, D].
        mean: float32 [B, H, 1, D], which is subtracted from the keys.
        used: bool [B, N], the keys that count, which come first. Other keys may hold anything.
        count: int32 [B], centroids of each row, at most the keys that count.
        rounds: how often centroids become the means of their keys, made of length 1.

    Returns:
        float32 [B, H, C, D], of the centred keys; anything behind ``count``.

    Raises:
        ValueError: there are fewer keys than centroids.
    """
    if key.shape[2] < most:
        raise ValueError(
            f"k-means must have at least as many keys as centroids, got {key.shape[2]} keys and {most} centroids"
        )
    total = jnp.sum(used, axis=1, dtype=jnp.int32)[:, None]
    order, parts = jnp.arange(most, dtype=jnp.int32)[None], jnp.maximum(count, 1)[:, None]
    exists = order < count[:, None]
    first = jnp.where(exists, (2 * order + 1) * total // (2 * parts), 0)  # the middle of each part
    start = jnp.take_along_axis(key, first[:, None, :, None], axis=2).astype(jnp.float32) - mean
    start = jnp.where(exists[:, None, :, None], start, 0)  # an empty slot may hold anything

    def iterate(_: Array, centroid: Array) -> Array:
        _, _, sums, _, members = assign(key, key[..., :0], mean, used, centroid, exists)
        less = members[..., None].astype(jnp.float32) * mean
        made, norm = sums - less, _norm(sums - less)
        there = (members > 0)[..., None] & (norm > _EQUAL * (_norm(sums) + _norm(less)))
        return jnp.where(there, made / jnp.where(there, norm, 1), centroid)

    return lax.fori_loop(0, rounds, iterate, start)


def assign(
    key: Array, value: Array, mean: Array, used: Array, centroid: Array, exists: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """Assign each key to the centroid with the largest product, in a tie to the first.

    Args:
        key: [B, H, N, D].
        value: [B, H, N, E].
        mean: float32 [B, H, 1, D], which is subtracted from the keys before they are compared.
        used: bool [B, N], the keys that count. Other keys may hold anything.
        centroid: float32 [B, H, C, D].
        exists: bool [B, C].

    Returns:
        For each key the index of its centroid int32 [B, H, N], and how many keys before it have the same, int32 [B, H, N];
        both are 0 for keys that do not count. For each centroid the sum of its keys float32 [B, H, C, D], from which nothing
        is subtracted, the sum of their values float32 [B, H, C, E], and their number int32 [B, H, C].
    """
    shape, slots, count = key.shape[:2], key.shape[2], centroid.shape[2]
    size = min(slots, max(_PRODUCTS // count, 1))
    row, head = jnp.arange(shape[0])[:, None, None], jnp.arange(shape[1])[None, :, None]

    def block(step: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        number, rank, keys, values, members = carry
        start = jnp.minimum(step * size, slots - size)  # the last block overlaps the block before it
        fresh = (start + jnp.arange(size, dtype=jnp.int32))[None] >= step * size
        counted = (lax.dynamic_slice_in_dim(used, start, size, 1) & fresh)[:, None]
        new_key, new_value = (
            jnp.where(counted[..., None], lax.dynamic_slice_in_dim(x, start, size, 2).astype(jnp.float32), 0)
            for x in (key, value)
        )
        product = jnp.einsum("bhnd,bhcd->bhnc", new_key - mean, centroid, precision=lax.Precision.HIGHEST)
        allowed = exists[:, None, None]
        slack = _EQUAL * jnp.max(jnp.where(allowed, jnp.abs(product), 0), axis=3, keepdims=True)
        product = jnp.where(allowed, product, -jnp.inf)
        own = jnp.argmax(product >= product.max(axis=3, keepdims=True) - slack, axis=3).astype(jnp.int32)
        same = (own[..., None] == own[:, :, None]) & counted[:, :, None] & jnp.tri(size, k=-1, dtype=bool)[None, None]
        place = jnp.sum(same, axis=3, dtype=jnp.int32) + members[row, head, own]

        def put(old: Array, new: Array) -> Array:
            before = lax.dynamic_slice_in_dim(old, start, size, 2)
            return lax.dynamic_update_slice_in_dim(old, jnp.where(counted, new, before), start, 2)

        return (
            put(number, own),
            put(rank, place),
            keys.at[row, head, own].add(new_key),
            values.at[row, head, own].add(new_value),
            members.at[row, head, own].add(jnp.broadcast_to(counted, own.shape).astype(jnp.int32)),
        )

    nothing = (
        jnp.zeros((*shape, slots), jnp.int32),
        jnp.zeros((*shape, slots), jnp.int32),
        jnp.zeros((*shape, count, key.shape[3]), jnp.float32),
        jnp.zeros((*shape, count, value.shape[3]), jnp.float32),
        jnp.zeros((*shape, count), jnp.int32),
    )
    return lax.fori_loop(0, -(-slots // size), block, nothing)


def _norm(x: Array) -> Array:
    """Compute the norm of vectors [..., D]: [..., 1]; its derivative is 0 where the norm is."""
    square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
    return jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1)), 0)
