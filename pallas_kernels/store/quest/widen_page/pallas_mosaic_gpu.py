"""The bounds of the newest page, widened in place through Mosaic GPU: a program for each list."""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.pallas import pl
from pallas_kernels.host import copy_row, sinks_of


def _body(key_ref, position_ref, cursor_ref, low_ref, high_ref, *, heads, slots, pages, copies, dim, page_size, sinks):
    # key [B, H, S, D], or copies [B, H, R, D]; position [B, H, S]; cursor [B]; low and high [B, H, P, D], in place.
    line = lax.axis_index("x")
    cursor = arrays.scalar(cursor_ref, lax.div(line, heads))
    slot = jnp.clip(cursor - 1, 0, slots - 1)
    held = arrays.scalar(position_ref, line * slots + slot) >= 0

    # A row without tokens, a full row, and a head without the newest token change nothing.
    @pl.when((cursor > 0) & (cursor <= slots) & held)
    def _():
        channel = arrays.counted(arrays.size_of(dim))
        place = jnp.where(channel < dim, channel, -1)
        row = slot if sinks is None else copy_row(slot, sinks, copies)
        of_key, of_page = (
            (arrays.spread(x, channel.shape[0]), dim) for x in (line * copies + row, line * pages + lax.div(slot, page_size))
        )
        key = arrays.load(key_ref, place, rows=of_key)
        low, high = (arrays.load(ref, place, rows=of_page) for ref in (low_ref, high_ref))
        # Bounds of inf and -inf, or NaN, compare false: the first key of a page is both of its bounds.
        arrays.store(low_ref, place, jnp.where(low <= key, low, key), of_page)
        arrays.store(high_ref, place, jnp.where(high >= key, high, key), of_page)


def widen_page(key, position, cursor, low, high, *, page_size, rows=None):
    """Widen the bounds of the newest page by the newest key."""
    (batch, heads, slots), (pages, dim) = position.shape, low.shape[2:]
    sizes = {"heads": heads, "slots": slots, "pages": pages, "copies": key.shape[2], "dim": dim}
    body = functools.partial(_body, **sizes, page_size=page_size, sinks=sinks_of(rows))
    return tuple(arrays.in_place(body, (low, high), grid=(batch * heads,))(key, position, cursor))


TAKES = arrays.HOPPER


def check(key, position, cursor, low, high, *, page_size, rows=None):
    """Raise ``NotImplementedError`` for other GPUs and dtypes."""
    arrays.check_hopper()
    arrays.check_floats(key, low)
