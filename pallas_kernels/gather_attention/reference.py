"""Decode attention over index lists in plain JAX: gather the listed rows, then attend in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import finite_or_zero


def gather_attention(query, key, value, slots, mask, *, scale, bias):
    """See ``pallas_kernels.gather_attention.gather_attention``."""
    index = jnp.where(mask, slots, 0)[..., None]
    # Masked rows are zeroed, not merely given weight 0: 0 * NaN is NaN.
    keys, values = (
        jnp.where(mask[..., None], jnp.take_along_axis(rows, index, axis=2, mode="clip"), 0).astype(jnp.float32)
        for rows in (key, value)
    )
    full = jax.lax.Precision.HIGHEST
    logits = scale * jnp.einsum("bhgd,bhkd->bhgk", query.astype(jnp.float32), keys, precision=full)
    if bias is not None:
        logits = logits + bias[:, :, None]
    logits = jnp.where(mask[:, :, None], logits, -jnp.inf)
    shift = finite_or_zero(jnp.max(logits, axis=-1, initial=-jnp.inf))
    weight = jnp.exp(logits - shift[..., None])
    total = jnp.sum(weight, axis=-1)
    out = jnp.einsum("bhgk,bhkd->bhgd", weight, values, precision=full)
    out = out / jnp.where(total > 0, total, 1)[..., None]
    return out.astype(query.dtype), shift + jnp.log(total)
