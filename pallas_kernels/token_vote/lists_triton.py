"""`token_list` and `turned_rows` as Pallas Triton kernels; see `pallas_kernels.token_vote.lists`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.triton_call import triton_call

LIST_BLOCK = 128  # entries per program
ROW_BLOCK = 16  # rows per program, of every head


def _list_kernel(fresh_ref, length_ref, awake_ref, budget_ref, *refs, num_sink, num_local):
    # fresh (and chosen) [B, K]; length, awake (and miss) [B]; budget [1]; (chosen [B, K];) token, used [B, E]
    *old, token_ref, used_ref = refs
    row, capacity, width = pl.program_id(0), fresh_ref.shape[1], token_ref.shape[1]
    place = pl.program_id(1) * LIST_BLOCK + jnp.arange(LIST_BLOCK, dtype=jnp.int32)
    item = jnp.clip(place - num_sink, 0, capacity - 1)
    picked = fresh_ref[row, item]
    if old:
        miss_ref, chosen_ref, chosen_out = old
        # Changed in place: an entry is read and written by the same program, others' are read in vain.
        picked = jnp.where(miss_ref[row], picked, chosen_ref[row, item])
        here = item == place - num_sink
        plt.store(chosen_out.at[row, jnp.where(here, item, capacity + place)], picked, mask=here)
    length, budget = length_ref[row], budget_ref[0]
    limit = num_sink + budget + num_local
    token = jnp.where(place < num_sink + budget, picked, length - limit + place)
    token = jnp.where((place < num_sink) | (length <= limit), place, token)
    used = (place < jnp.minimum(length, limit)) & (awake_ref[row] >= 0)
    inside = place < width
    plt.store(token_ref.at[row, place], jnp.where(used, token, 0), mask=inside)
    plt.store(used_ref.at[row, place], used, mask=inside)


def token_list(fresh, length, awake, budget, *old, num_sink, num_local, extra, interpret=False):
    """See ``pallas_kernels.token_vote.token_list``; ``interpret=True`` runs anywhere, slowly."""
    batch, capacity = fresh.shape
    width = num_sink + capacity + num_local + extra
    lists = jax.ShapeDtypeStruct((batch, width), jnp.int32), jax.ShapeDtypeStruct((batch, width), jnp.bool_)
    result = triton_call(
        functools.partial(_list_kernel, num_sink=num_sink, num_local=num_local),
        grid=(batch, pl.cdiv(width, LIST_BLOCK)),
        out_shape=(jax.ShapeDtypeStruct(fresh.shape, jnp.int32), *lists) if old else lists,
        input_output_aliases={5: 0} if old else {},
        name="token_vote_list",
        interpret=interpret,
    )(fresh, length, awake, budget.reshape(1), *old)
    return tuple(result) if old else (fresh, *result)


def _rows_kernel(key_ref, value_ref, token_ref, inv_freq_ref, key_out, value_out):
    # key, value [B, H, S, D]; token [B, E]; out [B, H, E, D]
    row, (heads, width, dim) = pl.program_id(0), key_out.shape[1:]
    place = pl.program_id(1) * ROW_BLOCK + jnp.arange(ROW_BLOCK, dtype=jnp.int32)
    place = jnp.minimum(place, width - 1)  # the last entry, written more than once, is the same each time
    token = jnp.clip(token_ref[row, place], 0, key_ref.shape[2] - 1)
    angle = place.astype(jnp.float32)[:, None] * inv_freq_ref[:][None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    low, high = pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)
    for head in range(heads):
        first, second = (key_ref[row, head, token, half].astype(jnp.float32) for half in (low, high))
        values = value_ref[row, head, token, :]
        key_out[row, head, place, low] = (first * cos - second * sin).astype(key_out.dtype)
        key_out[row, head, place, high] = (second * cos + first * sin).astype(key_out.dtype)
        value_out[row, head, place, :] = values


def turned_rows(key, value, token, inv_freq, *, interpret=False):
    """See ``pallas_kernels.token_vote.turned_rows``; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, _, dim = key.shape
    width = token.shape[1]
    rows = jax.ShapeDtypeStruct((batch, heads, width, dim), key.dtype)
    return triton_call(
        _rows_kernel,
        grid=(batch, pl.cdiv(width, ROW_BLOCK)),
        out_shape=(rows, rows),
        name="token_vote_rows",
        interpret=interpret,
    )(key, value, token, inv_freq)


def check(key, *_):
    """Raise ``NotImplementedError`` for head dims the kernel does not take."""
    dim = key.shape[-1]
    if dim < 16 or dim > 256 or dim & (dim - 1):
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from 16 to 256")
