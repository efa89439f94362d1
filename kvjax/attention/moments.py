"""Means and covariance of a row's queries, collected chunk by chunk, for methods that predict later queries."""

import jax.numpy as jnp
from jax import Array

from kvjax.protocol.typing import not_none, pytree, static
from pallas_kernels.numerics import product_precision


@pytree
class Moments:
    """Statistics of the queries of each head before RoPE, for `compress`: count, means, and the scatter if it reads it."""

    count: Array  # float32 [B], queries so far
    mean: Array  # float32 [B, H, G, D]
    length: Array  # float32 [B, H, G, D/2], mean length of the pairs of channels that RoPE rotates together
    # float32 [B, H, G, D, D], sum over queries of (q - mean) (q - mean)^T; None unless the method reads it (`Reads`).
    scatter: Array | None
    inv_freq: Array  # float32 [B, D/2], RoPE angle per position, in radians
    first: int = static("position of the first query that counts")

    @property
    def covariance(self) -> Array:
        """Covariance, the mean scatter per query: float32 [B, H, G, D, D]."""
        return not_none("scatter", self.scatter) / jnp.maximum(self.count, 1)[:, None, None, None, None]


def no_moments(batch: int, heads: int, group: int, head_dim: int, first: int, covariance: bool) -> Moments:
    """Make the moments of no query. Queries before position ``first`` will not count; ``covariance``: with a scatter."""
    return Moments(
        count=jnp.zeros((batch,), jnp.float32),
        mean=jnp.zeros((batch, heads, group, head_dim), jnp.float32),
        length=jnp.zeros((batch, heads, group, head_dim // 2), jnp.float32),
        scatter=jnp.zeros((batch, heads, group, head_dim, head_dim), jnp.float32) if covariance else None,
        inv_freq=jnp.zeros((batch, head_dim // 2), jnp.float32),
        first=first,
    )


def add_queries(moments: Moments, query: Array, position: Array, inv_freq: Array) -> Moments:
    """Add the queries of a chunk to the moments.

    Differences are taken from the mean of each part (Chan, Golub and LeVeque, 1979), so nothing cancels in float32.

    Args:
        query: [B, H, G, T, D], before RoPE.
        position: int32 [B, T], EMPTY for padding.
        inv_freq: float32 [D/2].

    Returns:
        The moments of all chunks.
    """
    counts = (position >= moments.first)[:, None, None, :, None]
    here = counts.sum(axis=(1, 2, 3, 4), dtype=jnp.float32)
    kept = jnp.where(counts, query.astype(jnp.float32), 0)
    some = jnp.maximum(here, 1)[:, None, None, None]
    mean, length = kept.sum(axis=3) / some, pair_lengths(kept).sum(axis=3) / some
    total = moments.count + here
    between, share = mean - moments.mean, here / jnp.maximum(total, 1)
    part = share[:, None, None, None]
    scatter = moments.scatter
    if scatter is not None:
        apart, weight = jnp.where(counts, kept - mean[..., None, :], 0), moments.count * share
        own = jnp.einsum("bhgti,bhgtj->bhgij", apart, apart, precision=product_precision(jnp.float32))
        moved = weight[:, None, None, None, None] * between[..., :, None] * between[..., None, :]
        scatter = scatter + own + moved
    return Moments(
        count=total,
        mean=moments.mean + between * part,
        length=moments.length + (length - moments.length) * part,
        scatter=scatter,
        inv_freq=jnp.broadcast_to(inv_freq[None], moments.inv_freq.shape),
        first=moments.first,
    )


def pair_lengths(x: Array) -> Array:
    """Compute the lengths of the channel pairs that RoPE rotates, which no rotation changes: [..., D] to [..., D/2]."""
    one, other = jnp.split(x, 2, axis=-1)
    return jnp.sqrt(one * one + other * other)


def rotation_mean(moments: Moments, start: Array, count: int) -> Array:
    """Average the rotations at ``count`` positions from ``start`` int32 [B] on: float32 [B, D, D], to multiply from the left.

    Args:
        count: number of positions, at least 1.
    """
    position = (start[:, None] + jnp.arange(count, dtype=jnp.int32)[None]).astype(jnp.float32)
    angle = position[..., None] * moments.inv_freq[:, None]  # [B, N, D/2]
    cos, sin = jnp.cos(angle).mean(axis=1)[:, None], jnp.sin(angle).mean(axis=1)[:, None]
    half = jnp.eye(moments.inv_freq.shape[1], dtype=jnp.float32)[None]
    return jnp.concatenate(
        [jnp.concatenate([half * cos, -half * sin], axis=2), jnp.concatenate([half * sin, half * cos], axis=2)], axis=1
    )
