"""Logits of pages in plain JAX: a matrix product, and a sum in one part."""

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import product_precision
from pallas_kernels.soft_cap import capped


def page_logits(query, vector, limit, held, *, scale):
    """Compute the logits of pages and their log-sum-exp, in plain JAX."""
    exact = product_precision(query.dtype)
    product = jnp.einsum("bhgd,bhpd->bhgp", query, vector, precision=exact, preferred_element_type=jnp.float32) * scale
    seen = jnp.arange(vector.shape[2], dtype=jnp.int32)[None, None] < limit[:, None, None]
    seen = seen if held is None else seen & held
    # NaN compares false.
    logits = jnp.where(seen[:, :, None] & (product > -jnp.inf), capped(product), -jnp.inf)
    return logits, jax.nn.logsumexp(logits, axis=3)[:, :, None]
