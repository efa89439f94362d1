"""Page scores in plain JAX: one or two matrix products in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import product_precision


def page_score(query, low, high, limit, *, page_size, added, reduce, newest, position, first):
    """Score every page for every KV head, in plain JAX."""
    # max(q * low, q * high) = max(q, 0) * high + min(q, 0) * low, so a bound is two matrix products.
    if reduce == "each" and high is None and added is None and query.dtype == low.dtype:
        return _used(_products(query, low, product_precision(low.dtype)), limit, page_size, newest, position, first)
    query = query.astype(jnp.float32)
    query = query if added is None else query + added
    parts = [(query, low)] if high is None else [(jnp.maximum(query, 0), high), (jnp.minimum(query, 0), low)]
    if reduce == "sum":
        parts = [(part.sum(axis=2, keepdims=True), bound) for part, bound in parts]
    full = jax.lax.Precision.HIGHEST
    score = sum(_products(part, bound.astype(jnp.float32), full) for part, bound in parts)
    return _used(score if reduce == "each" else score.max(axis=2), limit, page_size, newest, position, first)


def _products(query, bound, precision):
    return jnp.einsum("bhgd,bhpd->bhgp", query, bound, precision=precision, preferred_element_type=jnp.float32)


def _used(score, limit, page_size, newest, position, first):
    """Keep the scores of pages that are in use and hold a token; all other pages get -inf."""
    used = -(-limit // page_size)
    used = used.reshape(*used.shape, *(1,) * (score.ndim - used.ndim))
    page = jnp.arange(score.shape[-1], dtype=jnp.int32).reshape((1,) * (score.ndim - 1) + (-1,))
    # A page without a token has the bounds inf and -inf. It scores -inf, or NaN for a product 0 * inf; NaN compares false.
    score = jnp.where((page < used) & (score > -jnp.inf), score, -jnp.inf)
    score = jnp.where(page == used - 1, jnp.inf, score) if newest else score
    return score if position is None and not first else jnp.where(_chosen_from(page, position, first), score, -jnp.inf)


def _chosen_from(page, position, first):
    """Mask the pages that may score at all: bool that broadcasts to the scores of each query head."""
    return page >= first if position is None else (page >= first) & (position[:, :, None] >= 0)
