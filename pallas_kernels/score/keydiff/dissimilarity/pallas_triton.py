"""Minus the cosines with the mean direction, as two Pallas Triton kernels.

In the first kernel, each program adds up the directions of a part of the keys. The second kernel adds up these sums, and
multiplies every direction with their mean. Both read every key, the second kernel from the L2 cache. They share the function
that makes directions of keys, so they agree on every direction to the last bit.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.score.keydiff.dissimilarity.reference import LEAST

PART = 64  # keys per program


def _directions(key_ref, position_ref):
    """Load this program's slots: directions float32 [PART, D] (0 for empty slots), which are held, slots, which exist."""
    slot = pl.program_id(2) * PART + jnp.arange(PART, dtype=jnp.int32)
    inside = slot < position_ref.shape[0]
    held = plt.load(position_ref.at[slot], mask=inside, other=-1) >= 0
    # Threads behind the last slot read the last key again. An empty slot may hold NaN.
    key = key_ref[jnp.minimum(slot, position_ref.shape[0] - 1), :].astype(jnp.float32)
    key = jnp.where(held[:, None], key, 0.0)
    norm = jnp.sqrt(jnp.sum(key * key, axis=1))
    return key / jnp.maximum(norm, LEAST)[:, None], held, slot, inside


def _sums_kernel(key_ref, position_ref, sum_ref, count_ref):
    # Of one head: key [S, D], position [S]. Of this part: sum [D], count [].
    unit, held, _, _ = _directions(key_ref, position_ref)
    sum_ref[...] = jnp.sum(unit, axis=0)
    count_ref[...] = jnp.sum(held.astype(jnp.int32), dtype=jnp.int32)


def _products_kernel(sums_ref, counts_ref, key_ref, position_ref, out_ref):
    # Of one head: sums [parts, D], counts [parts], key [S, D], position [S], out [S].
    unit, _, slot, inside = _directions(key_ref, position_ref)
    parts, dim = sums_ref.shape

    def add(part, carry):
        total, count = carry
        return total + sums_ref[part, :], count + counts_ref[part]

    # Every program adds up the parts in the same order, so all have the same mean.
    total, count = lax.fori_loop(0, parts, add, (jnp.zeros((dim,), jnp.float32), jnp.int32(0)))
    mean = total / jnp.maximum(count, 1).astype(jnp.float32)
    mean = mean / jnp.maximum(jnp.sqrt(jnp.sum(mean * mean)), LEAST)
    plt.store(out_ref.at[slot], -jnp.sum(unit * mean[None, :], axis=1), mask=inside)


def dissimilarity(key, position, *, interpret=False):
    """Score each stored key by minus its cosine with the mean direction; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, slots, dim = key.shape
    parts = pl.cdiv(slots, PART)
    grid = (batch, heads, parts)

    def of_head(*shape):
        return pl.BlockSpec((None, None, *shape), lambda b, h, i: (b, h) + (0,) * len(shape))

    sums, counts = triton_call(
        _sums_kernel,
        grid=grid,
        in_specs=[of_head(slots, dim), of_head(slots)],
        out_specs=[
            pl.BlockSpec((None, None, None, dim), lambda b, h, i: (b, h, i, 0)),
            pl.BlockSpec((None, None, None), lambda b, h, i: (b, h, i)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, parts, dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, parts), jnp.int32),
        ],
        interpret=interpret,
        name="dissimilarity_sums",
    )(key, position)
    return triton_call(
        _products_kernel,
        grid=grid,
        in_specs=[of_head(parts, dim), of_head(parts), of_head(slots, dim), of_head(slots)],
        out_specs=of_head(slots),
        out_shape=jax.ShapeDtypeStruct((batch, heads, slots), jnp.float32),
        interpret=interpret,
        name="dissimilarity",
    )(sums, counts, key, position)


def check(key, position):
    """Raise ``NotImplementedError`` for head dims that are no block of the kernel, and for no slots at all."""
    slots, dim = key.shape[2:]
    if dim & (dim - 1) or dim < 16:
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two of at least 16")
    if not slots:
        raise NotImplementedError("got no slots")
