"""Page scores in plain JAX: one or two matrix products in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def page_score(query, low, high, limit, *, page_size, added, reduce, newest):
    """See ``pallas_kernels.page_score.page_score``."""
    # max(q * low, q * high) = max(q, 0) * high + min(q, 0) * low, so a bound is two matrix products.
    query = query.astype(jnp.float32)
    query = query if added is None else query + added
    parts = [(query, low)] if high is None else [(jnp.maximum(query, 0), high), (jnp.minimum(query, 0), low)]
    if reduce == "sum":
        parts = [(part.sum(axis=2, keepdims=True), bound) for part, bound in parts]
    full = jax.lax.Precision.HIGHEST
    score = sum(
        jnp.einsum("bhgd,bhpd->bhgp", part, bound.astype(jnp.float32), precision=full) for part, bound in parts
    )
    score = score if reduce == "each" else score.max(axis=2)
    used = -(-limit // page_size)
    used = used.reshape(*used.shape, *(1,) * (score.ndim - used.ndim))
    page = jnp.arange(low.shape[2], dtype=jnp.int32).reshape((1,) * (score.ndim - 1) + (-1,))
    # NaN compares false, so it becomes -inf like a page that is not in use.
    score = jnp.where((page < used) & (score > -jnp.inf), score, -jnp.inf)
    return jnp.where(page == used - 1, jnp.inf, score) if newest else score
