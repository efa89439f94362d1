"""Upkeep of the index in a decode step as one Pallas Triton kernel, in place.

One program per row of the batch. It encodes the new key of every head, and counts the older key of every head that just left
the local window, in one count per slice. The waiting counts are moved only when the buffer is full.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.block_specs import of_row, whole
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_bytes, check_head_dim
from pallas_kernels._triton.key_codes import codes, rotated
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.formats.key_codes import CLUSTERS
from pallas_kernels.host import copy_row, sinks_of

MOST_ELEMENTS = 1 << 13  # elements of one row's keys, held in registers


def _kernel(key_ref, position_ref, active_ref, cursor_ref, *refs, rotate, num_local, buffer, scale, sinks, interpret):
    # Of one row: key [H, S, D], or copies [H, R, D]; position [H, S]. Of all rows: active [B, 1], cursor [B]; signs [D] if
    # rotated. The index, as operands and as results in the same memory: ids, rows, counts and waiting [H, N * 256] of this
    # row, and stop [B].
    signs_ref = refs[:1] if rotate else ()
    ids_ref, rows_ref, counts_ref, waiting_ref, stop_ref = refs[-5:]  # results; the operands stand before them
    b = pl.program_id(0)
    heads, slots, slices = ids_ref.shape
    # The size of a block is a power of two: the last head is repeated, and written again with the same values.
    head = jnp.minimum(jnp.arange(pl.next_power_of_2(heads), dtype=jnp.int32), heads - 1)
    cursor, stop = cursor_ref[b], stop_ref[b]
    arrived = (active_ref[b, 0] >= 0).astype(jnp.int32)
    slot = cursor - 1

    @pl.when((arrived == 1) & (slot < slots))
    def _():
        row = slot if sinks is None else copy_row(slot, sinks, key_ref.shape[1])
        x = key_ref[head, row, :].astype(jnp.float32)
        made = codes(rotated(x, signs_ref[0][...]) if rotate else x, scale)
        for ref, new in zip((ids_ref, rows_ref), made, strict=True):
            ref[head, slot, :] = new

    # Tokens that have left the local window and are not counted yet: at most the token that left it in this step. It is older
    # than the new token, whose ids other threads may still be writing.
    beyond = cursor - stop - num_local
    flushed = lax.div(jnp.maximum(beyond, 0), buffer) * buffer
    turn = stop + jnp.maximum(beyond - arrived, 0)
    ripe = jnp.clip(turn, 0, slots - 1)
    due = (turn < stop + beyond) & (position_ref[head, ripe] >= 0)
    now = turn < stop + flushed
    table = jnp.arange(slices, dtype=jnp.int32) * CLUSTERS

    # The buffer is not full: add 1 to one count per slice and head.
    @pl.when((flushed == 0) & (turn < stop + beyond))
    def _():
        at = table[None, :] + ids_ref[head, ripe, :].astype(jnp.int32)
        waiting_ref[head[:, None], at] = waiting_ref[head[:, None], at] + due.astype(jnp.int32)[:, None]

    # The buffer is full: all waiting counts are added to the counts of the zone, head by head, which fits in registers. The
    # token of this step either goes with them or is the first of the next buffer.
    @pl.when(flushed > 0)
    def _():
        cluster = jnp.arange(CLUSTERS, dtype=jnp.int32)
        at = table[:, None] + cluster[None, :]

        def move(h, carry):
            one = ids_ref[h, ripe, :].astype(jnp.int32)[:, None] == cluster[None, :]
            one = one & (turn < stop + beyond) & (position_ref[h, ripe] >= 0)
            counts_ref[h, at] = counts_ref[h, at] + waiting_ref[h, at] + (one & now).astype(jnp.int32)
            waiting_ref[h, at] = (one & ~now).astype(jnp.int32)
            return carry

        lax.fori_loop(0, heads, move, 0)
        if not interpret:
            plt.debug_barrier()  # until all threads have read `stop`
        stop_ref[b] = stop + flushed


def store_codes(
    key, position, active, cursor, signs, ids, code_rows, counts, waiting, stop, *, num_local, buffer, scale,
    rows=None, interpret=False,
):  # fmt: skip
    """Store the codes of new tokens, and count tokens that left the window; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, _, slices = ids.shape
    flat = (batch, heads, slices * CLUSTERS)
    small = [key, position, active, cursor, *(() if signs is None else (signs,))]
    index = [ids, code_rows, counts.reshape(flat), waiting.reshape(flat)]
    *index, stop = triton_call(
        functools.partial(
            _kernel,
            rotate=signs is not None,
            num_local=num_local,
            buffer=buffer,
            scale=scale,
            sinks=sinks_of(rows),
            interpret=interpret,
        ),
        grid=(batch,),
        in_specs=[*(of_row(x) for x in small[:2]), *(whole(x) for x in small[2:]), *map(of_row, index), whole(stop)],
        out_specs=[*map(of_row, index), whole(stop)],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (*index, stop)],
        input_output_aliases={len(small) + i: i for i in range(len(index) + 1)},
        name="store_codes",
        num_warps=8,
        interpret=interpret,
    )(*small, *index, stop)
    return *index[:2], index[2].reshape(counts.shape), index[3].reshape(counts.shape), stop


def check(
    key, position, active, cursor, signs, ids, code_rows, counts, waiting, stop, *, num_local, buffer, scale,
    rows=None,
):  # fmt: skip
    """Raise ``NotImplementedError`` for sizes that the kernel does not take."""
    dim, tokens = key.shape[3], active.shape[1]
    if tokens != 1:
        raise NotImplementedError(f"got {tokens} tokens per row, expected one")
    if key.shape[1] * dim > MOST_ELEMENTS:
        raise NotImplementedError(f"got {key.shape[1]} heads of {dim}, expected at most {MOST_ELEMENTS} elements")
    check_head_dim(dim)
    check_bytes(ids, code_rows)
