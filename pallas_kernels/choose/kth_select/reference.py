"""Selection in plain JAX: sort, and list the chosen entries in slot order."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import finite_or_zero


def kth_select(score, budget, capacity, lse=None):
    """Return slots int32 [B, H, K], keep bool [B, H, K] and count int32 [B, H], as the operation does."""
    if lse is not None:
        total = finite_or_zero(jax.nn.logsumexp(lse, axis=2))
        score = (score - total[..., None]).max(axis=2)
    num_slots = score.shape[-1]
    # `top_k` would put -0 below 0. Compare bits: a comparison with 0 may take denormal numbers for 0 too.
    minus_zero = lax.bitcast_convert_type(score, jnp.int32) == -(2**31)
    order = jnp.where(score > -jnp.inf, jnp.where(minus_zero, 0, score), -jnp.inf)  # NaN compares false
    best, slots = lax.top_k(order, min(capacity, num_slots))
    budget = jnp.broadcast_to(jnp.asarray(budget, jnp.int32), score.shape[:2])[..., None]
    keep = (best > -jnp.inf) & (jnp.arange(slots.shape[-1], dtype=jnp.int32)[None, None] < budget)
    ordered = jnp.sort(jnp.where(keep, slots, num_slots), axis=-1)
    ordered = jnp.pad(ordered, [(0, 0), (0, 0), (0, capacity - slots.shape[-1])], constant_values=num_slots)
    keep = ordered < num_slots
    return jnp.where(keep, ordered, 0), keep, jnp.sum(keep, axis=-1, dtype=jnp.int32)
