"""Attention over the first slots of a cache through cuDNN's flash attention, which reads the cache without a copy."""

import jax.numpy as jnp

from pallas_kernels._cudnn import check as check
from pallas_kernels._cudnn import fused_attention


def past_attention(query, key, value, *, count, scale):
    """Attend to the first slots of each row, by cuDNN."""
    batch, heads, group, tokens, dim = query.shape
    flat = query.reshape(batch, heads * group, tokens, dim)
    # cuDNN never gets an empty part: where no slot is seen it reads one, and the result is replaced.
    ends = {"q_seqlen": jnp.full((batch,), tokens, jnp.int32), "kv_seqlen": jnp.maximum(count, 1)}
    out, lse = fused_attention(flat, key, value, scale=scale, **ends)
    some = (count > 0)[:, None, None]
    out, lse = jnp.where(some[..., None], out, 0), jnp.where(some, lse, -jnp.inf)
    return out.reshape(query.shape), lse.reshape(query.shape[:4])
