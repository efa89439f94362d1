"""Attention to clusters in plain JAX: one part."""

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import finite_or_zero, product_precision


def cluster_estimate(logits, chosen, left_out, size, value_sum):
    """Attend to the chosen clusters through their sums of values, in plain JAX."""
    chosen = chosen & ~left_out
    seen = chosen[:, :, None]
    members = jnp.log(jnp.maximum(size, 1).astype(jnp.float32))[:, :, None]
    lse = jax.nn.logsumexp(jnp.where(seen, logits + members, -jnp.inf), axis=3)
    weight = jnp.where(seen, jnp.exp(logits - finite_or_zero(lse)[..., None]), 0).astype(value_sum.dtype)
    out = jnp.einsum(
        "bhgc,bhcd->bhgd", weight, jnp.where(chosen[..., None], value_sum, 0), precision=product_precision(value_sum.dtype),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return out[:, :, None], lse[:, :, None]
