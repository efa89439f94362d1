"""Attention of a prompt chunk in plain JAX: dense attention with the positions that the chunk implies."""

import jax.numpy as jnp

from pallas_kernels.attend.dense_attention import dense_attention


def _block(tokens: int) -> int:
    """Choose the keys per step of the loop: one or two million logits per query head."""
    return max(256, min(max(1024, (1 << 20) // tokens), (1 << 21) // tokens))


def prefix_attention(query, key, value, *, start, length, scale):
    """Attend to a chunk's own tokens causally, and to all slots before them, in plain JAX."""
    batch, heads, _, tokens, _ = query.shape
    slots = key.shape[2]
    first = jnp.broadcast_to(jnp.asarray(start, jnp.int32), (batch,))
    own = jnp.full((batch,), tokens, jnp.int32) if length is None else length
    step, slot = (jnp.arange(n, dtype=jnp.int32)[None] for n in (tokens, slots))
    held = jnp.where(slot < (first + own)[:, None], slot, -1)
    return dense_attention(
        query,
        key,
        value,
        query_position=jnp.where(step < own[:, None], first[:, None] + step, -1),
        key_position=jnp.broadcast_to(held[:, None], (batch, heads, slots)),
        scale=scale,
        limit=jnp.max(first) + tokens,
        block=_block(tokens),
        implementation="xla",
    )
