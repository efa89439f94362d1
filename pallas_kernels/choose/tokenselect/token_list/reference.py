"""Sinks, chosen and newest tokens side by side, in plain JAX."""

import jax.numpy as jnp


def token_list(fresh, length, awake, budget, *old, num_sink, num_local, extra):
    """List the sinks, the chosen tokens and the newest tokens of each row, in plain JAX."""
    if old:
        miss, chosen = old
        fresh = jnp.where(miss[:, None], fresh, chosen)
    place = jnp.arange(num_sink + fresh.shape[1] + num_local + extra, dtype=jnp.int32)[None]
    limit = num_sink + budget + num_local
    length = length[:, None]
    # Sinks, then chosen tokens, then newest tokens, counted from the row's end. A row that fits lists all its tokens.
    picked = jnp.pad(fresh, ((0, 0), (num_sink, num_local + extra)))
    token = jnp.where(place < num_sink + budget, picked, length - limit + place)
    token = jnp.where((place < num_sink) | (length <= limit), place, token)
    used = (place < jnp.minimum(length, limit)) & (awake >= 0)[:, None]
    return fresh, jnp.where(used, token, 0), used
