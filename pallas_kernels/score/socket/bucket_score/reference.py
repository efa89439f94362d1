"""Plain JAX: the votes of all buckets, then a look-up of each key's bucket in each table."""

import math

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.formats.sign_codes import by_tables, corners, projections
from pallas_kernels.numerics import product_precision


def bucket_score(query, planes, temperature, ids, norm, position, cursor, *, first, num_local):
    """Add up the soft votes for each token's buckets, times its value's norm, in plain JAX."""
    soft = jnp.tanh(projections(query, planes)) / math.sqrt(query.shape[3])
    exact = product_precision(jnp.float32)
    logits = jnp.einsum("bhglp,cp->bhglc", soft, corners(planes.shape[1]), precision=exact) / temperature
    votes = jax.nn.softmax(logits, axis=4).sum(axis=2)  # of the group: [B, H, L, C]
    ids = by_tables(ids, planes.shape[0])[..., : position.shape[2]]
    found = jax.vmap(jax.vmap(jax.vmap(_pick)))(votes, ids)
    slot = jnp.arange(position.shape[2], dtype=jnp.int32)[None, None]
    searched = (position >= 0) & (slot >= first) & (slot < (cursor - num_local)[:, None, None])
    return jnp.where(searched, found.sum(axis=2) * norm.astype(jnp.float32), -jnp.inf)


def _pick(votes: Array, ids: Array) -> Array:
    return votes.at[ids.astype(jnp.int32)].get(mode="promise_in_bounds", wrap_negative_indices=False)
