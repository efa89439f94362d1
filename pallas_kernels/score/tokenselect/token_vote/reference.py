"""The vote in plain JAX: all logits at once, float32."""

import jax
import jax.numpy as jnp

from pallas_kernels.numerics import finite_or_zero


def token_vote(query: jax.Array, key: jax.Array, *, start: jax.Array | int, stop: jax.Array) -> jax.Array:
    """Add up the softmax of every query head over the candidates, in plain JAX; without a candidate no key is read."""
    rows, _, tokens, _ = key.shape
    place = jnp.arange(tokens, dtype=jnp.int32)[None]
    candidate = (place >= jnp.asarray(start, jnp.int32).reshape(-1, 1)) & (place < stop[:, None])

    def votes() -> jax.Array:
        wide = candidate[:, None, None]
        # Other keys are set to zero here, and not only masked afterwards: a NaN in them must not reach a sum.
        keys = jnp.where(candidate[:, None, :, None], key, 0).astype(jnp.float32)
        full = jax.lax.Precision.HIGHEST
        logits = jnp.einsum("bhgd,bhsd->bhgs", query.astype(jnp.float32), keys, precision=full)
        logits = jnp.where(wide, logits, -jnp.inf)
        shift = finite_or_zero(jnp.max(logits, axis=-1, keepdims=True))
        weight = jnp.exp(logits - shift)
        total = jnp.sum(weight, axis=-1, keepdims=True)
        vote = jnp.sum(weight / jnp.where(total > 0, total, 1), axis=(1, 2))
        return jnp.where(candidate, vote, -jnp.inf)

    def nobody() -> jax.Array:
        return jnp.full((rows, tokens), -jnp.inf, jnp.float32)

    return jax.lax.cond(candidate.any(), votes, nobody)
