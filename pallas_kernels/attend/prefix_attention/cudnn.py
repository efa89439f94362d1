"""Attention of a prompt chunk over a cache through cuDNN's flash attention, which reads the cache without a copy.

cuDNN's causal mask begins at the first key. So a chunk's attention is merged from full attention over the slots before it and
causal attention over its own keys.
"""

import jax.numpy as jnp
from jax import lax

from pallas_kernels import _cudnn
from pallas_kernels._cudnn import fused_attention
from pallas_kernels.numerics import merge_pair


def check(query, key, value, *, threshold, **_):
    """Raise ``NotImplementedError`` for a threshold, and for what cuDNN does not take."""
    if threshold is not None:
        raise NotImplementedError("got a threshold, expected none")
    _cudnn.check(query, key, value)


def prefix_attention(query, key, value, *, start, length, scale, threshold):
    """Attend to a chunk's own tokens causally, and to all slots before them, by cuDNN."""
    batch, heads, group, tokens, dim = query.shape
    flat = query.reshape(batch, heads * group, tokens, dim)
    own_key, own_value = (_chunk(x, start, tokens) for x in (key, value))
    real = None
    if length is not None:
        real = jnp.arange(tokens, dtype=jnp.int32)[None] < length[:, None]
        own_key, own_value = (jnp.where(real[:, None, :, None], x, 0) for x in (own_key, own_value))
    out, lse = fused_attention(flat, own_key, own_value, scale=scale, causal=True)
    if not isinstance(start, int) or start > 0:
        before = jnp.broadcast_to(jnp.asarray(start, jnp.int32), (batch,))
        # cuDNN never gets an empty part: where no slot precedes the chunk it reads one, which then gets the weight 0.
        ends = {"q_seqlen": jnp.full((batch,), tokens, jnp.int32), "kv_seqlen": jnp.maximum(before, 1)}
        past, past_lse = fused_attention(flat, key, value, scale=scale, **ends)
        past_lse = jnp.where(before[:, None, None] > 0, past_lse, -jnp.inf)
        out, lse = merge_pair(out, lse, past, past_lse)
    if real is not None:
        out = jnp.where(real[:, None, :, None], out, 0)
        lse = jnp.where(real[:, None], lse, -jnp.inf)
    return out.reshape(query.shape), lse.reshape(query.shape[:4])


def _chunk(store, start, tokens):
    """Take the chunk's own slots [B, H, T, D] of ``store`` [B, H, S, D]."""
    if isinstance(start, int) or start.ndim == 0:
        return lax.dynamic_slice_in_dim(store, start, tokens, 2)
    # Tokens that are not real may lie behind the last slot; a slice would move the whole chunk to fit.
    index = start[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]
    return jnp.take_along_axis(store, index[:, None, :, None], axis=2, mode="clip")
