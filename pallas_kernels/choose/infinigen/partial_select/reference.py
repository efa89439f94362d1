"""The tokens that InfiniGen attends to in plain JAX."""

import jax.numpy as jnp

from pallas_kernels.choose.kth_select import kth_select_mask
from pallas_kernels.score.infinigen.partial_score.reference import partial_score


def wanted(near, stored, budget, query_heads):
    """Count the tokens to list, the newest among them; see `partial_select`."""
    return jnp.where(stored <= budget, stored, jnp.minimum(near // query_heads, budget)) + 1


def partial_select(query, key, position, cursor, alpha, budget, *, scale, capacity, total, query_heads):
    """List the newest token and the best others by their partial keys, in plain JAX."""
    score, near, stored = partial_score(query, key, position, cursor, alpha, scale=scale)
    return kth_select_mask(score, wanted(total(near)[:, None], stored, budget, query_heads), capacity)
