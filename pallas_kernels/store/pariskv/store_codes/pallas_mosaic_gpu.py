"""Upkeep of the index in a decode step through Mosaic GPU, in place: a program for each row of the batch.

As in the kernel for Triton, it encodes the new key of every head, and counts the older key that just left the local window.
"""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.key_codes import DIMS, codes, rotated, store
from pallas_kernels._mosaic_gpu.pallas import pl
from pallas_kernels._mosaic_gpu.threads import THREADS
from pallas_kernels.formats.key_codes import CLUSTERS, SLICE
from pallas_kernels.host import copy_row, sinks_of

MOST_ELEMENTS = 2**13  # elements of a row's keys, in registers
EACH = 16  # counts of a thread that are moved together
TAKES = f"{arrays.HOPPER}, T = 1, D a power of two from {DIMS[0]} to {DIMS[-1]}, H * D up to {MOST_ELEMENTS}"


def _body(key_ref, position_ref, active_ref, cursor_ref, *refs, rotate, heads, slots, dim, num_local, buffer, scale, sinks):
    # key [L * S, D], or copies of rows; position [L * S]; active, cursor [B]; signs [D] if rotated; in place ids [L * S, N],
    # rows [L * S, D], counts and waiting [L * N * 256], stop [B].
    *signs_ref, ids_ref, rows_ref, counts_ref, waiting_ref, stop_ref = refs
    b, slices, copies = lax.axis_index("x"), dim // SLICE, key_ref.shape[0] // (active_ref.shape[0] * heads)
    cursor, stop, active = (arrays.scalar(ref, b) for ref in (cursor_ref, stop_ref, active_ref))
    arrived, slot = (active >= 0).astype(jnp.int32), cursor - 1

    @pl.when((arrived == 1) & (slot >= 0) & (slot < slots))
    def _():
        row = slot if sinks is None else copy_row(slot, sinks, copies)
        entry = arrays.counted(arrays.size_of(heads * slices))
        line, piece = b * heads + jnp.minimum(lax.div(entry, slices), heads - 1), lax.rem(entry, slices)
        x = arrays.load_run(key_ref, piece * SLICE, SLICE, (line * copies + row, dim))
        coded = codes(rotated(x, signs_ref[0], dim) if rotate else x, scale)
        store(ids_ref, rows_ref, line * slots + slot, jnp.where(entry < heads * slices, piece, -1), coded)

    # Tokens that have left the local window and are not counted yet: at most the token that left it in this step, which is
    # older than the new token.
    beyond = cursor - stop - num_local
    flushed = lax.div(jnp.maximum(beyond, 0), buffer) * buffer
    turn = stop + jnp.maximum(beyond - arrived, 0)
    ripe, left = jnp.clip(turn, 0, slots - 1), turn < stop + beyond

    def due_of(entry):  # of heads and slices: the line, whether its key is counted, and its cluster
        line = b * heads + jnp.minimum(lax.div(entry, slices), heads - 1)
        held = arrays.load(position_ref, line * slots + ripe) >= 0
        return line, held & left, arrays.load(ids_ref, lax.rem(entry, slices), rows=(line * slots + ripe, slices))

    # The buffer is not full: add 1 to one count of each slice and head.
    @pl.when((flushed == 0) & left)
    def _():
        entry = arrays.counted(arrays.size_of(heads * slices))
        line, due, cluster = due_of(entry)
        at = (line * slices + lax.rem(entry, slices)) * CLUSTERS + cluster
        at = jnp.where(due & (entry < heads * slices), at, -1)
        arrays.store(waiting_ref, at, arrays.load(waiting_ref, at) + 1)

    # The buffer is full: all waiting counts are added to the counts of the zone. The token of this step goes with them, or
    # is the first of the next buffer.
    @pl.when(flushed > 0)
    def _():
        now = turn < stop + flushed

        def move(step, carry):
            entry = step * (THREADS * EACH) + arrays.counted(THREADS * EACH)
            inside = entry < heads * slices * CLUSTERS
            _, due, cluster = due_of(lax.div(entry, CLUSTERS))
            one = (due & (lax.rem(entry, CLUSTERS) == cluster)).astype(jnp.int32)
            at = jnp.where(inside, b * (heads * slices * CLUSTERS) + entry, -1)
            moved = arrays.load(counts_ref, at) + arrays.load(waiting_ref, at)
            arrays.store(counts_ref, at, moved + one * now.astype(jnp.int32))
            arrays.store(waiting_ref, at, one * (1 - now.astype(jnp.int32)))
            return carry

        lax.fori_loop(0, -(-heads * slices * CLUSTERS // (THREADS * EACH)), move, 0)
        arrays.meet()  # until all threads have read `stop`
        arrays.put(stop_ref, b, stop + flushed)


def store_codes(
    key, position, active, cursor, signs, ids, code_rows, counts, waiting, stop, *, num_local, buffer, scale,
    rows=None,
):  # fmt: skip
    """Store the codes of new tokens, and count tokens that left the window."""
    batch, heads, slots, slices = ids.shape
    dim = slices * SLICE
    body = functools.partial(
        _body, rotate=signs is not None, heads=heads, slots=slots, dim=dim, num_local=num_local, buffer=buffer, scale=scale,
        sinks=sinks_of(rows),
    )  # fmt: skip
    states = [ids.reshape(-1, slices), code_rows.reshape(-1, dim), counts.reshape(-1), waiting.reshape(-1), stop]
    *index, stop = arrays.in_place(body, states, grid=(batch,))(
        key.reshape(-1, dim), position.reshape(-1), active.reshape(-1), cursor, *(() if signs is None else (signs,))
    )
    return *(x.reshape(old.shape) for x, old in zip(index, (ids, code_rows, counts, waiting), strict=True)), stop


def check(
    key, position, active, cursor, signs, ids, code_rows, counts, waiting, stop, *, num_local, buffer, scale,
    rows=None,
):  # fmt: skip
    """Raise ``NotImplementedError`` for other GPUs, several tokens, and sizes that the kernel does not take."""
    arrays.check_hopper()
    arrays.check_floats(key)
    heads, dim = key.shape[1], key.shape[3]
    if active.shape[1] != 1:
        raise NotImplementedError(f"got {active.shape[1]} tokens per row, expected one")
    if dim not in DIMS or heads * dim > MOST_ELEMENTS or max(position.size, counts.size) >= 2**31:
        raise NotImplementedError(f"got {heads} heads of {dim}, expected at most {MOST_ELEMENTS} elements, and one of {DIMS}")
