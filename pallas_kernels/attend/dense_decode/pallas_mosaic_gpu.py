"""Decode attention over contiguous slots through Mosaic GPU: `_mosaic_gpu.decode` on the slots below a limit.

Plain JAX rotates keys before; the mass of slots is a second pass over the keys.
"""

import math

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.decode import attend, check_machine
from pallas_kernels._mosaic_gpu.sizes import Lists
from pallas_kernels._mosaic_gpu.slot_weights import check_weights, slot_weights
from pallas_kernels.attend.dense_decode.rotation import rotated_keys
from pallas_kernels.formats.quantised import Quantised


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
    rotation=None,
    parts=False,
    mass=False,
    programs=None,
):
    """Attend with one or a few queries per head to all tokens below a limit; see `check` for what it does not take."""
    if rotation is not None:
        key = rotated_keys(key, position, rotation)
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
    found = out.reshape(*lead, *members, dim), lse.reshape(*lead, *members)
    if not mass:
        return found
    last = jnp.full((batch,), jnp.iinfo(jnp.int32).max, jnp.int32) if query_position is None else query_position[:, 0]
    first = [x if query_position is None else x[:, :, :, 0] for x in (query, found[1])]  # of several queries
    return *found, slot_weights(first[0], key, first[1], position, bound=limit, last=last, scale=scale)


def check(query, key, value, *, rotation=None, mass=False, **_):
    """Raise ``NotImplementedError`` for dtypes and widths, codes of 4 bits, codes to rotate, and the mass of codes."""
    check_machine(query, key, value)
    if (rotation is not None or mass) and isinstance(key, Quantised):
        raise NotImplementedError("got codes with a rotation or mass, expected numbers")
    if mass:
        check_weights(query if query.ndim == 4 else query[..., 0, :], key)
