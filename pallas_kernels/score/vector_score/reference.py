"""Scores of vectors in plain JAX: one matrix product in float32."""

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import product_precision
from pallas_kernels.score.page_score.reference import products, used_only


def vector_score(query, vector, limit, *, added, reduce, position, first):
    """Multiply the queries with every vector in use, in plain JAX."""
    precision = jax.lax.Precision.HIGHEST
    if reduce == "each" and added is None and query.dtype == vector.dtype:
        precision = product_precision(vector.dtype)
    else:
        query, vector = query.astype(jnp.float32), vector.astype(jnp.float32)
        query = query if added is None else query + added
    if reduce == "sum":
        return used_only(products(query.sum(axis=2, keepdims=True), vector, precision)[:, :, 0], limit)
    score = used_only(products(query, vector, precision), limit)
    part = jnp.arange(vector.shape[2], dtype=jnp.int32)[None, None, None] >= first
    part = part if position is None else part & (position[:, :, None] >= 0)
    return score if position is None and not first else jnp.where(part, score, -jnp.inf)
