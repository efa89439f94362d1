"""Blocks of keys of a cache with holes, in plain JAX: their logits, and how many blocks there are to read.

The logits in memory are never more than [B, H, G, T, block]. The number of blocks is a traced value, so a long cache that is
nearly empty costs as much as its tokens, not as its capacity. Under ``vmap`` with a batched bound the loop over blocks
runs to the largest bound and its slices become gathers: pass an unbatched ``limit`` there.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import product_precision
from pallas_kernels.soft_cap import capped


def visible(asked, held, first=None):
    """Tell which slots a query sees: bool, of int32 that broadcast, ``asked`` and ``first`` of queries, ``held`` of slots."""
    seen = (held >= 0) & (held <= asked)
    return seen if first is None else seen & (held >= first)


def block_logits(index, flat, key, query_position, key_position, *, scale, block, group, query_first=None):
    """Return the first slot of block ``index``, its logits float32 [B, H, G*T, block], and a mask of the visible logits."""
    slots = key.shape[2]
    # If the block size does not divide S, the last block starts early, which needs no padded copy of the cache. Slots that
    # the block before had are hidden, so each counts once.
    start = jnp.minimum(index * block, slots - block)
    part = jax.lax.dynamic_slice_in_dim(key, start, block, axis=2)
    logits = scale * jnp.einsum(
        "bhmd,bhsd->bhms", flat, part, precision=product_precision(flat.dtype), preferred_element_type=jnp.float32
    )
    position = jax.lax.dynamic_slice_in_dim(key_position, start, block, axis=2)
    fresh = start + jnp.arange(block) >= index * block
    position = jnp.where(fresh[None, None], position, -1)[:, :, None]
    asked, first = (None if x is None else jnp.tile(x, (1, group))[:, None, :, None] for x in (query_position, query_first))
    return start, capped(logits), visible(asked, position, first)


def block_count(query_position, key_position, limit, block):
    """Count the blocks of keys to read: up to ``limit``, or to the last slot that some query sees."""
    slots = key_position.shape[2]
    if limit is None:
        last = jnp.max(query_position, axis=1)[:, None, None]
        seen = (key_position >= 0) & (key_position <= last)
        limit = jnp.max(jnp.where(seen, jnp.arange(1, slots + 1)[None, None], 0))
    return (jnp.clip(jnp.asarray(limit, jnp.int32), 0, slots) + block - 1) // block
