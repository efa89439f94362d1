"""Decode attention over contiguous slots through Mosaic GPU: `_mosaic_gpu.decode` on the slots below a limit.

Of several queries plain JAX rotates the keys before. The mass of slots is plain JAX too, of the kernel's logits.
"""

import dataclasses
import math

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.decode import attend, check_machine, many_lists
from pallas_kernels._mosaic_gpu.sizes import ROWS, Lists
from pallas_kernels.attend.dense_decode.rotation import rotated_keys
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.numerics import LOG2_E, finite_or_zero


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
    if rotation is not None and query_position is not None:
        key, rotation = rotated_keys(key, position, rotation), None
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
    lists, inv_freq, held = Lists(operands, entries, row, block_number=skip, tiled=True), None, position
    if rotation is not None:
        lists = _placed(lists, position, rotation)
        position, inv_freq = None, rotation.inv_freq
    flat = (batch, heads, group)
    out, lse, *logits = attend(
        query.reshape(*flat, dim), key, value, lists, entries=slots, scale=scale, position=position,
        query_position=query_position, beside=partials and (partials[0].reshape(*flat, dim), partials[1].reshape(flat)),
        parts=parts, programs=programs, inv_freq=inv_freq, logits=mass,
    )  # fmt: skip
    lead = out.shape[: 2 + parts]
    found = out.reshape(*lead, *members, dim), lse.reshape(*lead, *members)
    if not mass:
        return found
    seen = (held >= 0) & (jnp.arange(slots, dtype=jnp.int32)[None, None] < limit[:, None, None])
    weight = jnp.exp2(logits[0] - finite_or_zero(found[1])[..., None] * LOG2_E)
    return *found, jnp.where(seen[:, :, None], weight, 0).sum(axis=2)


def _placed(lists, position, rotation):
    """Return ``lists`` of slots that tell the places of their keys, too."""
    _, heads, slots = position.shape

    def entries(refs, b, h):
        number, scalars = lists.entries(refs, b, h)
        return number, (*scalars, b * heads + h, refs[-1][b, 0], refs[-1][b, 1])

    def load(refs, scalars, entry):
        line, *origins = scalars[-3:]
        held = t.load_int(t.at(t.address(refs[-2]), t.element(line, slots, t.least(entry, slots - 1)), 4))
        return [held, held - (held < rotation.first).select(*origins)]

    def row(scalars, entry, loaded):
        return (loaded[0] >= 0).select(lists.row(scalars, entry, loaded), t.number(-1))

    operands = *lists.operands, position, rotation.origin
    return dataclasses.replace(lists, operands=operands, entries=entries, row=row, load=load, loads=2, turned=True)


def check(query, key, value, *, rotation=None, mass=False, **_):
    """Raise ``NotImplementedError`` for dtypes and widths, codes of 4 bits, codes to rotate, and the mass of codes."""
    check_machine(query, key, value)
    if (rotation is not None or mass) and isinstance(key, Quantised):
        raise NotImplementedError("got codes with a rotation or mass, expected numbers")
    if mass and (query.ndim > 4 or query.shape[2] > max(8, ROWS // query.shape[3])):
        raise NotImplementedError(f"got mass of queries {query.shape}, expected one query of fewer heads")


def first(query, *_, query_position=None, rotation=None, **__):
    """Tell whether keys are rotated for so many lists that this is faster than Triton's kernel and its merge."""
    return rotation is not None and query_position is None and many_lists(query)
