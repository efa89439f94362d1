"""Decode attention by cuDNN, for comparison: it knows lengths but no empty slots, so it is never chosen by itself."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.dense_decode import pallas_triton


def dense_decode(query, key, value, *, position, limit, scale):
    """See ``pallas_kernels.dense_decode.dense_decode``; every slot below the limit must be held."""
    # jax.nn.dot_product_attention takes the heads behind the slots only, which copies the cache, and rounds lse.
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

    held = jnp.clip(limit, 0, key.shape[2])
    try:
        out, lse = dot_product_attention(
            query,  # the group takes the place of query tokens: without a causal mask they are the same thing
            key,
            value,
            q_seqlen=jnp.full(query.shape[:1], query.shape[2], jnp.int32),
            kv_seqlen=held,
            scale=scale,
            mask_type=MaskType.PADDING,
            qkv_layout="BNTH",
            return_residual=True,
        )
    except RuntimeError as error:  # raised while tracing where the cuDNN library is missing
        if "cuDNN" not in str(error):
            raise
        raise NotImplementedError(f"got {error}, expected an installed cuDNN") from error
    some = (held > 0)[:, None, None]
    return jnp.where(some[..., None], out, 0), jnp.where(some, lse.reshape(query.shape[:3]), -jnp.inf)


def check(query, key, value, *, position, limit, scale):
    """Raise ``NotImplementedError`` for dtypes and head dims that the fused attention or "pallas_triton" does not take.

    Holes cannot be seen in shapes, so whoever names this implementation vouches that there are none below the limit.
    """
    pallas_triton.check(query, key, value, position=position, limit=limit, scale=scale)
    if str(query.dtype) == "float32" or query.shape[-1] > 128:
        raise NotImplementedError(f"got {query.dtype} and head_dim {query.shape[-1]}, expected 16 bits and at most 128")
