"""Selection by product-quantised keys in plain JAX: the score of every slot, then the best ones."""

import functools
import math
import operator

import jax
import jax.numpy as jnp

from pallas_kernels.choose.kth_select import kth_select_mask
from pallas_kernels.formats import bit_codes
from pallas_kernels.numerics import group_share, product_precision


def code_select(query, centroids, ids, stop, length, wanted, *, first, capacity, room):
    """List the first, the best searched and the last slots by their codes, in plain JAX."""
    batch, heads, group, dim = query.shape
    parts, count = centroids.shape[2:4]
    bits = bit_codes.bits_of(count)
    codes, _ = bit_codes.together(parts * bits)
    code = bit_codes.unpack(ids, ids.shape[2] * codes, parts * bits)
    split = query.astype(jnp.float32).reshape(batch, heads, group, parts, -1)
    exact = product_precision(jnp.float32)
    table = jnp.einsum("bhgmd,bhmcd->bhgmc", split, centroids, precision=exact) / math.sqrt(dim)
    logits = (_each(table[:, :, :, m], (code >> m * bits) & ((1 << bits) - 1)) for m in range(parts))
    slot = jnp.arange(code.shape[2], dtype=jnp.int32)[None, None]
    searched = jnp.broadcast_to((slot >= first) & (slot < stop[:, None, None]), code.shape)
    score = group_share(functools.reduce(operator.add, logits), searched)
    # A searched slot must beat all other slots even when its score is -inf.
    score = jnp.where(searched, jnp.maximum(score, jnp.finfo(jnp.float32).min), -jnp.inf)
    best, found = kth_select_mask(score, jnp.broadcast_to(wanted[:, None], (batch, heads)), capacity)
    before = jnp.broadcast_to(jnp.arange(first, dtype=jnp.int32)[None, None], (batch, heads, first))
    behind = jnp.arange(room, dtype=jnp.int32)[None, None] + stop[:, None, None]
    behind = jnp.broadcast_to(behind, (batch, heads, room))
    held = length[:, None, None]
    mask = jnp.concatenate([before < held, found, behind < held], axis=2)
    return jnp.where(mask, jnp.concatenate([before, best, behind], axis=2), 0), mask


def _each(table, index):
    """Look up ``table`` [B, H, G, C] at ``index`` int32 [B, H, S], which is in range: [B, H, G, S]."""

    def one(table, index):
        return table.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)

    return jax.vmap(jax.vmap(jax.vmap(one, (0, None))))(table, index)
