"""Pack the newest token of every list and the mean of its block, as one Pallas Triton kernel that writes in place.

A program turns one vector into its segment's basis, counts for every channel the channels that come before it (larger, or
equal and lower), keeps those with fewer than r before them, and stores the values and the bitmap where they belong. In jnp
this is some twenty launches.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.packed_attention.attend import list_spec
from pallas_kernels.triton_call import triton_call


def _pack(*refs, granule, element_group, channels):
    # the buffer's key and value [R, D] and position [R]; place, packed, last [1]; bases [M, D, D]; then the store, values
    # [S, r] and words [S, W] of keys, values and block means, once as operands and once as results
    key_ref, value_ref, stored_ref, place_ref, packed_ref, last_ref, basis_key_ref, basis_value_ref = refs[:8]
    store = refs[14:]
    kind, place = pl.program_id(1), place_ref[0]
    real = (place >= 0) & (place < store[0].shape[0])
    at, last = place - packed_ref[0], last_ref[0]
    size = pl.next_power_of_2(granule)

    def write(x, basis_ref, values_ref, words_ref, row):  # x float32 [D]
        turned = jnp.sum(basis_ref[last, :, :] * x[None], axis=1)
        kept = _largest(turned, values_ref.shape[1], element_group, channels)
        behind = lax.cumsum(kept, axis=0) - kept
        rows = jnp.full(kept.shape, row, jnp.int32)
        plt.store(values_ref.at[rows, behind], turned.astype(values_ref.dtype), mask=kept > 0)
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
        number = jnp.arange(size, dtype=jnp.int32)
        slot = jnp.minimum(at // granule * granule + number, key_ref.shape[0] - 1)
        held = (number < granule) & (stored_ref[slot] >= 0)
        keys = jnp.where(held[:, None], key_ref[slot, :], 0).astype(jnp.float32)
        write(jnp.sum(keys, axis=0) / granule, basis_key_ref, *store[4:], place // granule)


def _largest(y, rank, element_group, channels):
    """Which channels of y float32 [D] are kept, as int32 0 or 1; equal ones by lower channel."""
    dim = y.shape[0]
    score = jnp.abs(y)
    if element_group > 1:
        groups = y.reshape(-1, element_group)
        groups = jnp.sum(groups * groups, axis=1)[:, None]
        score = jnp.broadcast_to(groups, (dim // element_group, element_group)).reshape(dim)
    channel = jnp.arange(dim, dtype=jnp.int32)
    score = jnp.where(channel < channels, score, -1.0)
    mine, other = score[:, None], score[None, :]
    first = (other > mine) | ((other == mine) & (channel[None, :] < channel[:, None]))
    return (jnp.sum(first.astype(jnp.int32), axis=1) < rank).astype(jnp.int32)


def pack_token(
    key, value, stored, place, packed, last, basis_key, basis_value, store, *, granule, element_group, channels,
    interpret=False,
):  # fmt: skip
    """See ``pallas_kernels.packed_attention.pack_token``; ``interpret=True`` runs anywhere, slowly."""
    rows, heads = key.shape[:2]
    lists = rows * heads
    per_row = [x.reshape(rows, 1) for x in (place, packed, last)]
    flat = [x.reshape(lists, *x.shape[2:]) for x in (key, value, stored, basis_key, basis_value, *store)]
    operands = [*flat[:3], *per_row, *flat[3:]]
    written = operands[8:]
    packed = triton_call(
        functools.partial(_pack, granule=granule, element_group=element_group, channels=channels),
        grid=(lists, 3),
        in_specs=[list_spec(x, lists // x.shape[0]) for x in operands],
        out_specs=[list_spec(x, 1) for x in written],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written],
        input_output_aliases={8 + i: i for i in range(6)},
        name="pack_token",
        num_warps=8,
        num_stages=1,
        interpret=interpret,
    )(*operands)
    return tuple(x.reshape(old.shape) for x, old in zip(packed, store, strict=True))
