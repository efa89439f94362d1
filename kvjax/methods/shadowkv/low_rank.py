"""Keys of low rank: the keys of all KV heads side by side, as a product of two thin matrices."""

import jax.numpy as jnp
from jax import Array, lax

from kvjax.methods.eigen import eigenvectors
from pallas_kernels import axes

_BLOCK = 4096  # tokens that are copied to float32 at once
_EXACT = lax.Precision.HIGHEST


def factorize(key: Array, length: Array, rank: int) -> tuple[Array, Array]:
    """Compute the best rank-R approximation ``left @ right[:, h]`` of ``key[:, h]``, for all KV heads side by side.

    R right singular vectors are eigenvectors of the keys' second moment, which is summed in float32. On a mesh that divides
    the heads, every device gathers the keys of all heads, some tokens at a time, and gets the same vectors.

    Args:
        key: [B, H, S, D], before RoPE.
        length: int32 [B]; the first ``length`` tokens count, later tokens may hold anything.

    Returns:
        left [B, S, R], which all heads share, 0 for tokens that do not count; and right [B, H, R, D]. Both in the dtype of
        the keys. The rows of all heads' ``right`` side by side are unit vectors.
    """
    batch, heads, slots, dim = key.shape
    every, size = heads * axes.size(axes.MODEL), min(_BLOCK, slots)
    blocks = -(-slots // size)

    def block(number: Array) -> tuple[Array, Array]:
        start = jnp.minimum(number * size, slots - size)  # the last block overlaps the block before it
        slot = start + jnp.arange(size, dtype=jnp.int32)
        part = lax.dynamic_slice_in_dim(key, start, size, 2).astype(jnp.float32)
        return slot, jnp.where((slot[None] < length[:, None])[:, None, :, None], part, 0)

    def add(number: Array, moment: Array) -> Array:
        slot, part = block(number)
        part = axes.joined(jnp.where((slot >= number * size)[None, None, :, None], part, 0), 1)
        return moment + jnp.einsum("bhsd,bgse->bhdge", part, part, precision=_EXACT)

    moment = lax.fori_loop(0, blocks, add, jnp.zeros((batch, every, dim, every, dim), jnp.float32))
    vectors = eigenvectors(moment.reshape(batch, every * dim, -1))[..., ::-1][..., :rank]
    vectors = jnp.pad(vectors, ((0, 0), (0, 0), (0, rank - vectors.shape[2])))
    right = vectors.reshape(batch, every, dim, rank).swapaxes(2, 3)
    right = lax.dynamic_slice_in_dim(right, axes.index(axes.MODEL) * heads, heads, 1).astype(key.dtype)

    def project(number: Array, left: Array) -> Array:
        slot, part = block(number)
        product = jnp.einsum("bhsd,bhrd->bsr", part, right.astype(jnp.float32), precision=_EXACT)
        return lax.dynamic_update_slice_in_dim(left, axes.total(product).astype(left.dtype), slot[0], 1)

    return lax.fori_loop(0, blocks, project, jnp.zeros((batch, slots, rank), key.dtype)), right
