"""A decode step's query in plain JAX."""

import jax.numpy as jnp

from pallas_kernels.numerics import rotate_halves
from pallas_kernels.query.tokenselect.step_query.result import StepQuery


def products(now, last):
    """Compute squared norms and inner product of two queries float32 [B, H, G, D], over all heads: float32 [B, 3]."""
    return jnp.stack([jnp.sum(x, axis=(1, 2, 3)) for x in (now * now, last * last, now * last)], axis=1)


def step_query(
    query, last, ready, hits, refreshes, cursor, position, budget, theta, inv_freq, products_of_all=None, *, num_sink,
    num_local,
):  # fmt: skip
    """Do what the operation does; ``products_of_all`` float32 [B, 3] may be sums over more heads than the query's."""
    limit = num_sink + budget + num_local
    now = query.astype(jnp.float32)
    of_now, of_last, of_both = (products(now, last) if products_of_all is None else products_of_all).T
    cosine = of_both / jnp.maximum(jnp.sqrt(of_now * of_last), 1e-30)
    sparse = (cursor > limit) & (position >= 0)
    hit = sparse & ready & (cosine >= theta)
    miss = sparse & ~hit
    scored = jnp.full((len(query), 1), num_local, jnp.int32)
    asked = jnp.minimum(cursor, limit)[:, None] - 1

    def rotated_at(place):  # [B, 1]
        return rotate_halves(now, (place.astype(jnp.float32) * inv_freq[None])[:, None, None])

    return StepQuery(
        mean=rotated_at(scored), rotated=rotated_at(asked).astype(query.dtype),
        last=jnp.where(miss[:, None, None, None], now, last), ready=ready | miss, hits=hits + hit.astype(jnp.int32),
        refreshes=refreshes + miss.astype(jnp.int32), miss=miss, stop=jnp.where(miss, cursor - num_local, 0),
        wanted=jnp.where(miss, budget, 0),
    )  # fmt: skip
