"""Online eviction of the key most alike to the mean direction, in plain JAX."""

import jax
import jax.numpy as jnp

from pallas_kernels.formats.quantised import numbers_at, whole
from pallas_kernels.numerics import sum_pieces
from pallas_kernels.score.keydiff.dissimilarity.reference import LEAST
from pallas_kernels.store.evict_token.reference import evict_token, worst_slot

_ROWS = 1024  # keys whose directions are in memory at once at least


def unit(key):
    """Normalise keys float32 [..., D] to directions; the direction of a zero key is 0."""
    return key / _length(key)


def _length(key):
    return jnp.maximum(jnp.sqrt(jnp.sum(key * key, axis=-1, keepdims=True)), LEAST)


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
    slots = position.shape[2]

    def summed(slot, held):
        part = jnp.where(held[..., None], numbers_at(key, slot), 0).astype(jnp.float32)
        return jnp.stack([jnp.sum(x, axis=2, dtype=jnp.int32) for x in words(unit(part), slots)], axis=2)

    order = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), position.shape)
    return sum_pieces(summed, max(_ROWS, slots // 16), order, position >= 0)


def evict_alike(key, value, position, cursor, total, done, *, newest, budget):
    """Evict the key of each head that is most alike to the mean direction, in plain JAX."""
    batch, heads, slots = position.shape
    b, h, held = jnp.arange(batch)[:, None], jnp.arange(heads)[None], position >= 0
    vector = whole(key).astype(jnp.float32)  # where no token is held too: a copy without those would be a second cache
    length = _length(vector)

    def at(slot, counts):  # the directions of one slot per head, in rows where they count
        one = jnp.where(held[b, h, slot][..., None], numbers_at(key, slot[..., None])[:, :, 0], 0)
        info = jnp.finfo(one.dtype)  # on a GPU, XLA would read codes without this rounding, and the sum would drift
        one = jax.lax.reduce_precision(one.astype(jnp.float32), info.nexp, info.nmant)
        return jnp.where(counts[:, None, None, None], jnp.stack(words(unit(one), slots), axis=2), 0)

    last = jnp.broadcast_to(jnp.clip(cursor - 1, 0, slots - 1)[:, None], (batch, heads))
    total = total + at(last, newest >= 0)
    # The length of the sum scales all cosines of a head alike.
    score = -jnp.sum(vector * number(total[:, :, 0], total[:, :, 1], slots)[:, :, None], axis=-1) / length[..., 0]
    total = total - at(worst_slot(score, held, position), cursor > budget)
    # Read before it is written: else a CPU's XLA writes into a copy.
    (score, total), (key, value) = jax.lax.optimization_barrier(((score, total), (key, value)))
    kept = evict_token(key, value, position, cursor, score, budget=budget)
    return (*kept[:4], total, done)
