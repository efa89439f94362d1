"""Page scores in plain JAX: two matrix products in float32."""

import jax
import jax.numpy as jnp


def page_score(query, low, high, limit, *, page_size, reduce, newest):
    """Score every page for every KV head, in plain JAX."""
    # max(q * low, q * high) = max(q, 0) * high + min(q, 0) * low, so a bound is two matrix products.
    query = query.astype(jnp.float32)
    parts = [(jnp.maximum(query, 0), high), (jnp.minimum(query, 0), low)]
    score = sum(products(part, bound.astype(jnp.float32), jax.lax.Precision.HIGHEST) for part, bound in parts)
    return used_only(score if reduce == "each" else score.max(axis=2), -(-limit // page_size), newest)


def products(query, vector, precision):
    """Multiply each query [B, H, G, D] with each vector [B, H, P, D]: float32 [B, H, G, P]."""
    return jnp.einsum("bhgd,bhpd->bhgp", query, vector, precision=precision, preferred_element_type=jnp.float32)


def used_only(score, used, newest=False):
    """Keep the scores of the pages before ``used`` int32 [B] or [B, H] that hold a token; all other pages get -inf."""
    used = used.reshape(*used.shape, *(1,) * (score.ndim - used.ndim))
    page = jnp.arange(score.shape[-1], dtype=jnp.int32).reshape((1,) * (score.ndim - 1) + (-1,))
    # A page without a token has the bounds inf and -inf. It scores -inf, or NaN for a product 0 * inf; NaN compares false.
    score = jnp.where((page < used) & (score > -jnp.inf), score, -jnp.inf)
    return jnp.where(page == used - 1, jnp.inf, score) if newest else score
