"""Decode attention over contiguous slots through Mosaic GPU: `_mosaic_gpu.decode` on the slots below a limit."""

import math

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.decode import attend, check_machine
from pallas_kernels._mosaic_gpu.sizes import Lists


def dense_decode(
    query,
    key,
    value,
    *,
    position,
    limit,
    scale,
    partials=None,
    gap=None,
    query_position=None,
    parts=False,
    programs=None,
    **_,
):
    """Attend with one or a few queries per head to all tokens below a limit; see `check` for what it does not take."""
    batch, heads, *members, dim = query.shape
    slots, group = key.shape[2], math.prod(members)

    def entries(refs, b, h):
        end = jnp.clip(refs[0][b], 0, slots)
        return end, (end,)

    def row(scalars, entry, _):
        return (entry < scalars[0]).select(entry, t.number(-1))

    def without_gap(refs, b, h, blocks, block):
        start, stop = refs[1][b, h, 0], jnp.minimum(refs[1][b, h, 1], jnp.clip(refs[0][b], 0, slots))
        first = lax.div(start + (block - 1), block)
        left_out = jnp.maximum(lax.div(stop, block) - first, 0)  # whole blocks of the gap
        return blocks - left_out, lambda step: jnp.where(step < first, step, step + left_out)

    operands, skip = ((limit,), None) if gap is None else ((limit, gap), without_gap)
    lists = Lists(operands, entries, row, block_number=skip, tiled=True)
    flat = (batch, heads, group)
    out, lse = attend(
        query.reshape(*flat, dim),
        key,
        value,
        lists,
        entries=slots,
        scale=scale,
        position=position,
        query_position=query_position,
        beside=partials and (partials[0].reshape(*flat, dim), partials[1].reshape(flat)),
        parts=parts,
        programs=programs,
    )
    lead = out.shape[: 2 + parts]
    return out.reshape(*lead, *members, dim), lse.reshape(*lead, *members)


def check(query, key, value, *, rotation=None, mass=False, **_):
    """Raise ``NotImplementedError`` for dtypes and widths, codes of 4 bits, keys to rotate, and the mass of slots."""
    check_machine(query, key, value)
    if rotation is not None or mass:
        raise NotImplementedError("got a rotation or mass, expected neither")
