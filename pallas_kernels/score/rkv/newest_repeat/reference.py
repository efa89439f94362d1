"""The newest slot with a near key in plain JAX: loops over tiles of products, or all products at once if they are few.

On a GPU each step of these loops waits for the host, which is why there is a kernel.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import made_after, product_precision

WHOLE = 1 << 18  # up to so many products per KV head are computed at once, without tiles
TILES = 256, 1024  # slots per tile, and slots that a tile is compared with at once


def newest_repeat(key, valid, *, threshold, whole: int = WHOLE, tiles: tuple[int, int] = TILES):
    """Find the newest other slot whose key is near each slot's key, in plain JAX."""
    slots = key.shape[2]
    order = jnp.arange(slots, dtype=jnp.int32)
    rows, columns = (slots, slots) if slots * slots <= whole else (min(size, slots) for size in tiles)

    def newest(first: jax.Array | int) -> jax.Array:
        """Find the newest repeat of each of the slots from ``first`` on: int32 [B, H, rows]."""
        at = (first + order[:rows])[None, None, :, None]
        own, counts = (lax.dynamic_slice_in_dim(x, first, rows, 2) for x in (key, valid))

        def tile(begin: jax.Array | int) -> jax.Array:
            there = (begin + order[:columns])[None, None, None]
            other, held = (lax.dynamic_slice_in_dim(x, begin, columns, 2) for x in (key, valid))
            exact = product_precision(key.dtype)
            products = jnp.einsum("bhid,bhjd->bhij", own, other, precision=exact, preferred_element_type=jnp.float32)
            near = (products > threshold) & held[:, :, None] & (at != there)
            return jnp.where(near, there, -1).max(axis=3)

        def older(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            number, found = carry
            begin = jnp.minimum(number * columns, slots - columns)  # the last tile may overlap the tile before it
            return number - 1, jnp.where(found < 0, tile(begin), found)

        if columns == slots:
            found = tile(0)
        else:
            start = jnp.int32((slots - 1) // columns), jnp.full(counts.shape, -1, jnp.int32)
            found = lax.while_loop(lambda x: (x[0] >= 0) & (counts & (x[1] < 0)).any(), older, start)[1]
        return jnp.where(counts, jnp.maximum(found, 0), 0)

    if rows == slots:
        return newest(0)

    def add(number: jax.Array, out: jax.Array) -> jax.Array:
        first = jnp.minimum(number * rows, slots - rows)
        return lax.dynamic_update_slice_in_dim(out, newest(first), first, 2)

    return lax.fori_loop(0, -(-slots // rows), add, made_after(key, jnp.zeros(valid.shape, jnp.int32)))
