"""The store of the newest partial key and query by one Pallas Triton kernel, in place: a program per list."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.block_specs import of_head, whole
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.host import copy_row, sinks_of


def _kernel(cursor_ref, place_ref, key_ref, position_ref, matrix_ref, query_ref, *refs, sinks):
    # Of all rows: cursor, place [B]. Of one list: key [S, D], or copies [R, D]; position [S]; matrix [D, C]; query [G, D];
    # partial [C, N] and last [G, D], before and after, in the same memory.
    *_, partial_ref, last_ref = refs
    cursor, num_slots, (dim, channels) = cursor_ref[pl.program_id(0)], position_ref.shape[0], matrix_ref.shape
    slot = jnp.minimum(jnp.maximum(cursor - 1, 0), num_slots - 1)
    # C need not be a power of two.
    channel = jnp.arange(pl.next_power_of_2(channels), dtype=jnp.int32)
    line, column = (
        jnp.broadcast_to(x, (dim, len(channel))) for x in (jnp.arange(dim, dtype=jnp.int32)[:, None], channel[None])
    )
    matrix = plt.load(matrix_ref.at[line, column], mask=column < channels, other=0.0)

    @pl.when((cursor > 0) & (cursor <= num_slots) & (position_ref[slot] >= 0))
    def _():
        key = key_ref[slot if sinks is None else copy_row(slot, sinks, key_ref.shape[0]), :]
        product = jnp.sum(key.astype(jnp.float32)[:, None] * matrix, axis=0)
        plt.store(partial_ref.at[channel, slot], product.astype(partial_ref.dtype), mask=channel < channels)

    @pl.when(place_ref[pl.program_id(0)] >= 0)
    def _():
        # The size of a block is a power of two: the last head is repeated, and written again with the same values.
        group = query_ref.shape[0]
        head = jnp.minimum(jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32), group - 1)
        last_ref[head, :] = query_ref[head, :]


def store_partial(key, position, cursor, matrix, query, place, partial, last, *, rows=None, interpret=False):
    """Store the partial key of the newest token and the step's query; ``interpret=True`` runs anywhere, slowly."""
    lists, stored = (key, position, matrix, query), (partial, last)
    return triton_call(
        functools.partial(_kernel, sinks=sinks_of(rows)),
        grid=key.shape[:2],
        in_specs=[whole(cursor), whole(place), *map(of_head, (*lists, *stored))],
        out_specs=[*map(of_head, stored)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stored],
        input_output_aliases={6: 0, 7: 1},
        num_warps=4,
        num_stages=1,
        interpret=interpret,
        name="store_partial",
    )(cursor, place, *lists, *stored)


def check(key, position, cursor, matrix, query, place, partial, last, *, rows=None):
    """Raise ``NotImplementedError`` for head dims that the kernel does not take."""
    dim, channels = matrix.shape[2:]
    if dim & (dim - 1) or dim > 256 or not 0 < channels <= dim:
        raise NotImplementedError(f"got {channels} of {dim} channels, expected a power of two up to 256, and some of them")
