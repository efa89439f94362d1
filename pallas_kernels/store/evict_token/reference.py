"""Online eviction in plain JAX."""

import jax
import jax.numpy as jnp

EMPTY = -1


def worst_slot(score, valid, position):
    """Find the slot to evict, int32 [B, H]: the lowest ``score`` [B, H, S] where ``valid``; slot 0 if none is valid.

    Of equal scores the newest token goes and older tokens stay, as they do where the best slots are listed in order.
    """
    score = jnp.where(valid, score, jnp.inf)
    lowest = valid & (score == score.min(axis=2, keepdims=True))
    return jnp.argmax(jnp.where(lowest, position, EMPTY), axis=2)


def evict_token(key, value, position, cursor, score, *, budget, gain=None, first=0, recent=0):
    """Evict the token of each head with the lowest score, in plain JAX."""
    batch, heads, slots = position.shape
    b, h = jnp.arange(batch)[:, None], jnp.arange(heads)[None]
    last = jnp.broadcast_to(jnp.clip(cursor - 1, 0, slots - 1)[:, None], (batch, heads))
    carried, newest = position[b, h, last], position.max(axis=2)
    if gain is not None:
        score = score + gain
    may_go = (position >= first) & (position >= 0) & (position <= newest[..., None] - recent)
    worst = _oldest(position, may_go) if score is None else worst_slot(score, may_go, position)
    full = cursor > budget
    target = jnp.where(full[:, None], worst, last)
    moved = position.at[b, h, target].set(carried)
    moved = moved.at[b, h, last].set(jnp.where(full[:, None], EMPTY, carried))
    if score is not None and score.shape[1] < heads:  # a score that all heads share does not move
        score = None
    if score is not None:
        freed = score.at[b, h, last].set(jnp.where(full[:, None], 0, score[b, h, last]))
        score = freed.at[b, h, target].set(score[b, h, last])
    read = jax.tree.map(lambda x: x[b, h, last], (key, value))
    # Read before it is written: else a CPU's XLA writes into a copy.
    read, (key, value) = jax.lax.optimization_barrier((read, (key, value)))
    key, value = jax.tree.map(lambda x, row: x.at[b, h, target].set(row), (key, value), read)
    return (key, value, moved, cursor - full.astype(jnp.int32), score)


def _oldest(position, may_go):
    return jnp.argmin(jnp.where(may_go, position, jnp.iinfo(jnp.int32).max), axis=2)
