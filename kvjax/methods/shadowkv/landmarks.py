"""ShadowKV's summary of the chunks of a prompt: mean keys, and how well they stand for their chunk."""

import jax.numpy as jnp
from jax import Array, lax

from kvjax.rope import rotate

_BLOCK = 4096  # tokens that are copied to float32 at once


def landmarks(key: Array, chunks: int, size: int, inv_freq: Array) -> tuple[Array, Array]:
    """Compute the mean rotated key of each chunk, and its cosine with the least similar key.

    Args:
        key: [B, H, S, D], before RoPE.
        inv_freq: float32 [D/2].

    Returns:
        [B, H, P, D] in the dtype of the keys; and float32 [B, H, P], the smallest cosine of a key and the mean, squared with
        its sign: no root is taken, so that equal cosines are equal numbers. 0 where one of the two is zero.
    """
    batch, heads, _, dim = key.shape
    count = min(max(_BLOCK // size, 1), chunks)

    def block(number: Array, made: tuple[Array, Array]) -> tuple[Array, Array]:
        start = jnp.minimum(number * count, chunks - count)  # the last block overlaps the block before it
        position = start * size + jnp.arange(count * size, dtype=jnp.int32)
        part = lax.dynamic_slice_in_dim(key, start * size, count * size, 2)
        part = rotate(part, position[None, None], inv_freq).astype(jnp.float32)
        part = part.reshape(batch, heads, count, size, dim)
        mean = part.mean(axis=3, keepdims=True)
        product = jnp.sum(part * mean, axis=4)
        norms = jnp.sum(jnp.square(part), axis=4) * jnp.sum(jnp.square(mean), axis=4)
        cosine = jnp.where(norms > 0, product * jnp.abs(product) / jnp.where(norms > 0, norms, 1), 0)
        new = mean[:, :, :, 0].astype(key.dtype), cosine.min(axis=3)
        means, least = (lax.dynamic_update_slice_in_dim(old, x, start, 2) for old, x in zip(made, new, strict=True))
        return means, least

    empty = jnp.zeros((batch, heads, chunks, dim), key.dtype), jnp.zeros((batch, heads, chunks), jnp.float32)
    return lax.fori_loop(0, -(-chunks // count), block, empty)
