"""Online eviction of the key most alike to the mean direction, in plain JAX."""

import jax.numpy as jnp

from pallas_kernels.formats.quantised import whole
from pallas_kernels.score.keydiff.dissimilarity.reference import LEAST
from pallas_kernels.store.evict_token.reference import evict_token, worst_slot


def unit(key):
    """Normalise keys float32 [..., D] to directions; the direction of a zero key is 0."""
    return key / jnp.maximum(jnp.sqrt(jnp.sum(key * key, axis=-1, keepdims=True)), LEAST)


def words(direction, slots):
    """Split each channel of a direction into two int32: the channel, rounded, and the rest, rounded too.

    The sum over ``slots`` directions fits into int32.
    """
    one = _one(slots)
    near = jnp.floor(direction * one + 0.5)
    rest = jnp.floor((direction - near / one) * one**2 + 0.5)  # the difference is exact
    return near.astype(jnp.int32), rest.astype(jnp.int32)


def number(near, rest, slots):
    """Join two `words`, or their sums, to a float32."""
    one = _one(slots)
    return near.astype(jnp.float32) / one + rest.astype(jnp.float32) / one**2


def _one(slots):
    return 2.0 ** (30 - slots.bit_length())


def direction_sum(key, position):
    """Sum the directions of the stored keys, in plain JAX."""
    key = jnp.where((position >= 0)[..., None], key, 0).astype(jnp.float32)
    return jnp.stack([jnp.sum(x, axis=2, dtype=jnp.int32) for x in words(unit(key), position.shape[2])], axis=2)


def evict_alike(key, value, position, cursor, total, done, *, newest, budget):
    """Evict the key of each head that is most alike to the mean direction, in plain JAX."""
    batch, heads, slots = position.shape
    b, h, held = jnp.arange(batch)[:, None], jnp.arange(heads)[None], position >= 0
    direction = unit(jnp.where(held[..., None], whole(key), 0).astype(jnp.float32))

    def at(slot, counts):  # the directions of one slot per head, in rows where they count
        return jnp.where(counts[:, None, None, None], jnp.stack(words(direction[b, h, slot], slots), axis=2), 0)

    last = jnp.broadcast_to(jnp.clip(cursor - 1, 0, slots - 1)[:, None], (batch, heads))
    total = total + at(last, newest >= 0)
    # The length of the sum scales all cosines of a head alike.
    score = -jnp.sum(direction * number(total[:, :, 0], total[:, :, 1], slots)[:, :, None], axis=-1)
    total = total - at(worst_slot(score, held, position), cursor > budget)
    kept = evict_token(key, value, position, cursor, score, budget=budget)
    return (*kept[:4], total, done)
