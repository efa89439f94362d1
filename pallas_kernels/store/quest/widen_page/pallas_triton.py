"""The bounds of the newest page, widened in place by one Pallas Triton kernel: a program per list."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl
from pallas_kernels.host import copy_row, sinks_of


def _kernel(cursor_ref, key_ref, position_ref, old_low_ref, old_high_ref, low_ref, high_ref, *, heads, page_size, sinks):
    # Of all rows: cursor [B]. Of one list: key [S, D], or copies [R, D]; position [S]; low and high [P, D], before and after,
    # in the same memory.
    cursor = cursor_ref[pl.program_id(0) // heads]
    num_slots = position_ref.shape[0]
    slot = jnp.minimum(jnp.maximum(cursor - 1, 0), num_slots - 1)
    page = slot // page_size

    # A row without tokens, a full row, and a head without the newest token change nothing.
    @pl.when((cursor > 0) & (cursor <= num_slots) & (position_ref[slot] >= 0))
    def _():
        row = slot if sinks is None else copy_row(slot, sinks, key_ref.shape[0])
        key, low, high = key_ref[row, :], old_low_ref[page, :], old_high_ref[page, :]
        # Bounds of inf and -inf, or NaN, compare false: the first key of a page is both of its bounds.
        low_ref[page, :] = jnp.where(low <= key, low, key)
        high_ref[page, :] = jnp.where(high >= key, high, key)


def widen_page(key, position, cursor, low, high, *, page_size, rows=None, interpret=False):
    """Widen the bounds of the newest page by the newest key; ``interpret=True`` runs anywhere, slowly."""
    batch, heads = key.shape[:2]
    lists = batch * heads
    lines = [x.reshape(lists, *x.shape[2:]) for x in (key, position, low, high)]
    specs = [pl.BlockSpec((None, *x.shape[1:]), lambda i, n=x.ndim: (i,) + (0,) * (n - 1)) for x in lines]
    low_after, high_after = triton_call(
        functools.partial(_kernel, heads=heads, page_size=page_size, sinks=sinks_of(rows)),
        grid=(lists,),
        in_specs=[pl.BlockSpec(cursor.shape, lambda i: (0,)), *specs],
        out_specs=specs[2:],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in lines[2:]],
        input_output_aliases={3: 0, 4: 1},
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        name="widen_page",
    )(cursor, *lines)
    return low_after.reshape(low.shape), high_after.reshape(high.shape)


def check(key, position, cursor, low, high, *, page_size, rows=None):
    """Raise ``NotImplementedError`` for head dims that the kernel does not take."""
    dim = key.shape[-1]
    if dim & (dim - 1):
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two")
