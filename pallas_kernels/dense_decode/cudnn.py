"""Decode attention by cuDNN, for comparison: it knows lengths but no empty slots, so it only runs when it is named."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels._cudnn import fused_attention
from pallas_kernels._triton.quantised import refuse_codes
from pallas_kernels.dense_decode import pallas_triton


def dense_decode(query, key, value, *, position, limit, scale):
    """See ``pallas_kernels.dense_decode.dense_decode``; every slot below the limit must hold a token."""
    held = jnp.clip(limit, 0, key.shape[2])
    # The group stands in for query tokens: without a causal mask cuDNN treats both alike.
    tokens = jnp.full(query.shape[:1], query.shape[2], jnp.int32)
    out, lse = fused_attention(query, key, value, q_seqlen=tokens, kv_seqlen=held, scale=scale)
    some = (held > 0)[:, None, None]
    return jnp.where(some[..., None], out, 0), jnp.where(some, lse.reshape(query.shape[:3]), -jnp.inf)


def check(query, key, value, *, position, limit, scale):
    """Raise ``NotImplementedError`` for dtypes and head dims that the fused attention or "pallas_triton" does not take.

    Shapes do not show empty slots. The caller who names this implementation guarantees that there are none below the limit.
    """
    pallas_triton.check(query, key, value, position=position, limit=limit, scale=scale)
    refuse_codes(key, value)
    if str(query.dtype) == "float32" or query.shape[-1] > 128:
        raise NotImplementedError(f"got {query.dtype} and head_dim {query.shape[-1]}, expected 16 bits and at most 128")
