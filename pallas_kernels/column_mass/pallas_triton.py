"""Attention probability of every slot for one query per head, as one Pallas Triton kernel.

A decode step needs no loop over blocks of the cache: each program has a block of slots.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.shared_memory import check_fits
from pallas_kernels.numerics import finite_or_zero, product_precision

PART = 64  # slots of one program


def _kernel(asked_ref, query_ref, lse_ref, key_ref, position_ref, out_ref, *, scale):
    # Of all rows: asked [B], the position of each row's query. Of one head: query [G, D], lse [G], key [S, D], position [S],
    # out [S].
    group, slots = query_ref.shape[0], position_ref.shape[0]
    # Query heads fill up a power of two by repeating the last; the sum below leaves the repetitions out.
    rows = jnp.arange(pl.next_power_of_2(group), dtype=jnp.int32)
    member = jnp.minimum(rows, group - 1)
    slot = pl.program_id(2) * PART + jnp.arange(PART, dtype=jnp.int32)
    inside = slot < slots
    position = plt.load(position_ref.at[slot], mask=inside, other=-1)
    seen = (position >= 0) & (position <= asked_ref[pl.program_id(0)])
    query = query_ref[member, :]
    key = key_ref[jnp.minimum(slot, slots - 1), :]
    logits = plt.dot(query, key, trans_b=True, precision=product_precision(query.dtype)) * scale
    weight = jnp.exp(jnp.where(seen[None, :], logits - finite_or_zero(lse_ref[member])[:, None], -jnp.inf))
    plt.store(out_ref.at[slot], jnp.sum(jnp.where(rows[:, None] < group, weight, 0), axis=0), mask=inside)


def column_mass(query, key, lse, *, query_position, key_position, scale, limit, block, interpret=False):
    """See ``pallas_kernels.column_mass.column_mass`` for T = 1; ``interpret=True`` runs anywhere, slowly."""
    rows, heads, group, _, dim = query.shape
    slots = key.shape[2]

    def of_head(*shape):
        return pl.BlockSpec((None, None, *shape), lambda b, h, i: (b, h) + (0,) * len(shape))

    return triton_call(
        functools.partial(_kernel, scale=scale),
        grid=(rows, heads, pl.cdiv(slots, PART)),
        in_specs=[
            pl.BlockSpec((rows,), lambda b, h, i: (0,)),
            of_head(group, dim),
            of_head(group),
            of_head(slots, dim),
            of_head(slots),
        ],
        out_specs=of_head(slots),
        out_shape=jax.ShapeDtypeStruct((rows, heads, slots), jnp.float32),
        interpret=interpret,
        name="column_mass",
    )(query_position[:, 0], query[..., 0, :], lse[..., 0], key, key_position)


def check(query, key, lse, *, query_position, key_position, scale, limit, block):
    """Raise ``NotImplementedError`` for more queries than one, and for dtypes and sizes the kernel does not take."""
    length, dim = query.shape[3:]
    if length != 1:
        raise NotImplementedError(f"got {length} queries, expected 1")
    if str(query.dtype) not in ("bfloat16", "float16", "float32"):
        raise NotImplementedError(f"got {query.dtype}, expected bfloat16, float16 or float32")
    if dim < 16 or dim > 256 or dim & (dim - 1) or not key.shape[2]:
        raise NotImplementedError(f"got head_dim {dim} and {key.shape[2]} slots, expected a power of two from 16 to 256")
    check_fits(query.dtype.itemsize * dim * (pl.next_power_of_2(query.shape[2]) + PART))  # queries and keys
