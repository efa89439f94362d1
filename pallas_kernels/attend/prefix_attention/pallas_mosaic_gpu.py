"""Attention of a prompt chunk over a cache through Mosaic GPU, in one pass over the chunk and what precedes it."""

import jax.numpy as jnp

from pallas_kernels._mosaic_gpu.prompt import attend
from pallas_kernels._mosaic_gpu.prompt import check as check


def prefix_attention(query, key, value, *, start, length, scale, threshold):
    """Attend to a chunk's own tokens causally, and to all slots before them, by Mosaic GPU."""
    batch, _, _, tokens, _ = query.shape
    first = jnp.broadcast_to(jnp.asarray(start, jnp.int32), (batch,))
    real = jnp.full((batch,), tokens, jnp.int32) if length is None else length
    bounds = jnp.stack([first + 1, first + real, real], axis=1)
    return attend(query, key, value, bounds=bounds, scale=scale, threshold=threshold)
