"""One token and the mean of a block that it fills, packed through Mosaic GPU in place: three programs for each list.

A thread has a channel. It counts the channels that rank before its own in shared memory, and the truth values of a warp are
a word of the bitmap.
"""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.packed import CARDS
from pallas_kernels._mosaic_gpu.pallas import pl, plgpu
from pallas_kernels._mosaic_gpu.products import CHUNK, Products
from pallas_kernels._mosaic_gpu.team import Team
from pallas_kernels._mosaic_gpu.threads import THREADS
from pallas_kernels.formats.packed_vectors import check_format
from pallas_kernels.machine import current_machine

PARTS = 2  # of a basis, so that registers are enough for three programs at once
TOGETHER = 8  # channels that are compared in one step of a loop
ALONE = Team(groups=1, parts=1, share=THREADS)
TAKES = f"{CARDS}, D of 64 or 128 in one dtype"


def _body(
    key_ref, value_ref, stored_ref, place_ref, packed_ref, last_ref, basis_key_ref, basis_value_ref, *refs,
    heads, buffer, segments, dim, granule,
):  # fmt: skip
    # key, value [L * R, D]; stored [L * R]; place, packed, last [B]; bases [L * M * D, D]; in place values [L, S, r] and
    # words [L, S, W] of keys, of values and of block means. In shared memory: D numbers, and 4 counts.
    *store, numbers, counts = refs
    line, kind = lax.axis_index("x"), lax.axis_index("y")
    b = lax.div(line, heads)
    place, last = arrays.scalar(place_ref, b), arrays.scalar(last_ref, b)
    at = place - arrays.scalar(packed_ref, b)  # the token's slot in the buffer
    real = (place >= 0) & (place < store[0].shape[1])
    channel = arrays.counted(THREADS)
    inside = channel < dim

    def load(ref, slot, where):
        row = line * buffer + jnp.clip(slot, 0, buffer - 1)
        return arrays.load(ref, jnp.where(inside & where, channel, -1), rows=(arrays.spread(row, THREADS), dim))

    def mean():
        total = arrays.spread(0.0, THREADS, jnp.float32)
        for i in range(granule):
            slot = jnp.minimum(lax.div(at, granule) * granule + i, buffer - 1)
            total = total + load(key_ref, slot, arrays.scalar(stored_ref, line * buffer + slot) >= 0)
        return total / granule

    def write(x, basis_ref, values_ref, words_ref, row):  # x float32 [128]
        n = Products(1, dim, dim * (dim // CHUNK) // THREADS // PARTS)
        entry, (place_of, _, mine) = arrays.counted(THREADS * CHUNK), n.entries()
        held = (entry & (n.lanes - 1)) * CHUNK + lax.shift_right_logical(entry, 7)
        arrays.store_shared(numbers, channel, x)
        arrays.meet()
        query = arrays.load_shared(numbers, held)
        arrays.meet()

        def multiply(part, carry):
            rows = (line * segments + last) * dim + part * n.rows + n.step_rows()
            projected = n.multiply(query, n.chunks((basis_ref,), rows), [basis_ref.dtype])
            arrays.store_shared(numbers, jnp.where(mine, part * n.rows + place_of, THREADS), projected)
            return carry

        lax.fori_loop(0, PARTS, multiply, 0)
        arrays.meet()
        y = arrays.load_shared(numbers, channel)
        arrays.meet()
        score = jnp.abs(y)
        arrays.store_shared(numbers, channel, score)
        arrays.meet()

        def count(step, before):
            for i in range(TOGETHER):
                number = step * TOGETHER + i
                other = arrays.load_shared(numbers, arrays.spread(number, THREADS))
                first = (other > score) | ((other == score) & (channel > number))
                before = before + first.astype(jnp.int32)
            return before

        before = lax.fori_loop(0, dim // TOGETHER, count, arrays.spread(0, THREADS))
        kept = (inside & (before < values_ref.shape[2])).astype(jnp.int32)
        (behind, _), word = ALONE.before(kept, counts), arrays.ballots(kept)
        where = jnp.where((kept > 0) & (behind < values_ref.shape[2]), behind, -1)
        arrays.store(values_ref, where, y, (arrays.spread(line * values_ref.shape[1] + row, THREADS), values_ref.shape[2]))
        where = jnp.where(inside & ((channel & 31) < 1), lax.shift_right_logical(channel, 5), -1)
        arrays.store(words_ref, where, word, (arrays.spread(line * words_ref.shape[1] + row, THREADS), words_ref.shape[2]))

    @pl.when(real & (kind == 0))
    def _():
        write(load(key_ref, at, True), basis_key_ref, *store[:2], place)

    @pl.when(real & (kind == 1))
    def _():
        write(load(value_ref, at, True), basis_value_ref, *store[2:4], place)

    @pl.when(real & (kind == 2) & (lax.rem(place, granule) == granule - 1))
    def _():
        write(mean(), basis_key_ref, *store[4:], lax.div(place, granule))


def pack_token(key, value, stored, place, packed, last, basis_key, basis_value, store, *, granule):
    """Pack one token of a buffer, and the mean of a block that it fills, into a store."""
    (rows, heads, buffer, dim), segments = key.shape, basis_key.shape[2]
    lists = rows * heads
    flat = [x.reshape(-1, dim) for x in (key, value)], [x.reshape(-1, dim) for x in (basis_key, basis_value)]
    body = functools.partial(_body, heads=heads, buffer=buffer, segments=segments, dim=dim, granule=granule)
    scratch = [plgpu.SMEM((2 * THREADS,), jnp.float32), ALONE.scratch[0]]
    states = [x.reshape(lists, *x.shape[2:]) for x in store]
    packed = arrays.in_place(body, states, grid=(lists, 3), scratch=scratch)(
        *flat[0], stored.reshape(-1), place, packed, last, *flat[1]
    )
    return tuple(x.reshape(old.shape) for x, old in zip(packed, store, strict=True))


def check(key, value, stored, place, packed, last, basis_key, basis_value, store, *, granule):
    """Raise ``NotImplementedError`` for other machines, head dims and dtypes than the kernel takes."""
    if not current_machine().has_kernels:
        raise NotImplementedError(f"got {current_machine()}, expected {CARDS}")
    check_format(key.shape[-1], key.dtype, value.dtype, *(x.dtype for x in store[::2]))
    if key.shape[-1] not in (64, 128) or max(x.size for x in (basis_key, stored)) >= 2**31:
        raise NotImplementedError(f"got head_dim {key.shape[-1]}, expected 64 or 128")
