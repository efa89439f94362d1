"""One token and the mean of its block, packed by one Pallas Triton kernel that writes in place.

A list has three programs: for its key, its value and its block mean. A program projects one vector onto the basis of its
segment. For every channel it counts the channels that rank before it: larger channels, and lower channels of equal size. A
channel with fewer than r channels before it is kept. The program stores the kept values and the bitmap. In jnp this takes
some twenty launches.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.block_specs import of_list
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.formats.packed_vectors import check_format


def _kernel(*refs, granule, channels):
    # Of one list: the buffer's key and value [R, D] and position [R]; two bases [M, D, D]; of its row: place, packed and
    # last [1]. Then the store: values [S, r] and words [S, W] of keys, of values and of block means. Operands 8 to 13 are
    # the store before, and the results from 14 on are the same memory.
    key_ref, value_ref, stored_ref, place_ref, packed_ref, last_ref, basis_key_ref, basis_value_ref = refs[:8]
    store = refs[14:]
    kind, place = pl.program_id(1), place_ref[0]
    # Nothing is written for a row without a token, or for a token behind the store's end.
    real = (place >= 0) & (place < store[0].shape[0])
    at, last = place - packed_ref[0], last_ref[0]  # the token's slot in the buffer, and its segment
    size = pl.next_power_of_2(granule)

    def write(x, basis_ref, values_ref, words_ref, row):  # x float32 [D]
        projected = jnp.sum(basis_ref[last, :, :] * x[None], axis=1)
        kept = _largest(projected, values_ref.shape[1], channels)
        behind = lax.cumsum(kept, axis=0) - kept  # kept channels before each channel: where its value is stored
        rows = jnp.full(kept.shape, row, jnp.int32)
        plt.store(values_ref.at[rows, behind], projected.astype(values_ref.dtype), mask=kept > 0)
        # Channel c is bit c % 32 of word c // 32: a sum of shifted bits makes the word.
        lane = jnp.arange(32, dtype=jnp.int32)[None]
        words_ref[row, :] = jnp.sum(jnp.left_shift(kept.reshape(-1, 32), lane), axis=1)

    @pl.when(real & (kind == 0))
    def _():
        write(key_ref[at, :].astype(jnp.float32), basis_key_ref, *store[:2], place)

    @pl.when(real & (kind == 1))
    def _():
        write(value_ref[at, :].astype(jnp.float32), basis_value_ref, *store[2:4], place)

    @pl.when(real & (kind == 2))
    def _():
        # The mean of the keys of the token's block that have arrived, over the whole block: missing ones count as zero.
        number = jnp.arange(size, dtype=jnp.int32)
        slot = jnp.minimum(at // granule * granule + number, key_ref.shape[0] - 1)
        held = (number < granule) & (stored_ref[slot] >= 0)
        keys = jnp.where(held[:, None], key_ref[slot, :], 0).astype(jnp.float32)
        write(jnp.sum(keys, axis=0) / granule, basis_key_ref, *store[4:], place // granule)


def _largest(y, rank, channels):
    """Mark the channels of y float32 [D] that are kept, int32 0 or 1; of equal channels the lower one is kept."""
    channel = jnp.arange(y.shape[0], dtype=jnp.int32)
    # Sizes are not negative, so -1 ranks the channels that may not be kept last.
    score = jnp.where(channel < channels, jnp.abs(y), -1.0)
    # All pairs of channels: a matrix of D * D comparisons, which is cheaper here than a sort.
    mine, other = score[:, None], score[None, :]
    first = (other > mine) | ((other == mine) & (channel[None, :] < channel[:, None]))
    return (jnp.sum(first.astype(jnp.int32), axis=1) < rank).astype(jnp.int32)


def pack_token(key, value, stored, place, packed, last, basis_key, basis_value, store, *, granule, channels, interpret=False):
    """Pack one token of a buffer and the mean of its block into a store; ``interpret=True`` runs anywhere, slowly."""
    rows, heads = key.shape[:2]
    lists = rows * heads
    per_row = [x.reshape(rows, 1) for x in (place, packed, last)]
    flat = [x.reshape(lists, *x.shape[2:]) for x in (key, value, stored, basis_key, basis_value, *store)]
    operands = [*flat[:3], *per_row, *flat[3:]]
    written = operands[8:]
    packed = triton_call(
        functools.partial(_kernel, granule=granule, channels=channels),
        grid=(lists, 3),
        in_specs=[of_list(x, lists // x.shape[0]) for x in operands],
        out_specs=[of_list(x, 1) for x in written],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written],
        input_output_aliases={8 + i: i for i in range(6)},
        name="pack_token",
        num_warps=8,
        num_stages=1,
        interpret=interpret,
    )(*operands)
    return tuple(x.reshape(old.shape) for x, old in zip(packed, store, strict=True))


def check(key, value, stored, place, packed, last, basis_key, basis_value, store, *, granule, channels):
    """Raise ``NotImplementedError`` for head dims and dtypes that the kernel does not take."""
    check_format(key.shape[-1], key.dtype, value.dtype, *(x.dtype for x in store[::2]))
    if key.shape[-1] > 128:
        raise NotImplementedError(f"got head_dim {key.shape[-1]}, expected at most 128")
