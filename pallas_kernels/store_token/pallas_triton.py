"""Storing a token as one Pallas Triton kernel, where XLA takes six launches: rotations and guarded writes.

One program per row of the batch: nobody else reads or writes the row's cursor, so that is written in place too. Query, key
and value come as one array: they are slices of one projection, which XLA then hands over without copying them apart.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.gather_attention.turn import cosine_sine
from pallas_kernels.host import copy_row, sinks_of
from pallas_kernels.triton_call import triton_call

MOST_ELEMENTS = 1 << 14  # of one row's query, held in registers


def _kernel(*refs, group, turned, sinks):
    # packed [B, H, P, D], P = group + 2 (query heads, key, value); place, cursor [B]; then the cache and what is written
    packed_ref, place_ref, cursor_ref, *refs = refs
    inv_freq_ref = refs.pop(0) if turned else None
    key_ref, value_ref, position_ref, moved_ref = refs[3:7]  # the first three are the same arrays, as operands
    query_ref = refs[-1] if turned else None
    b = pl.program_id(0)
    place, at = place_ref[b], cursor_ref[b]
    half = packed_ref.shape[3] // 2
    halves = (pl.ds(0, half), pl.ds(half, half))

    def turn(first, second):
        if not turned:
            return first, second
        cos, sin = cosine_sine(place.astype(jnp.float32) * inv_freq_ref[:][None, :])
        a, c = first.astype(jnp.float32), second.astype(jnp.float32)
        return (a * cos - c * sin).astype(first.dtype), (c * cos + a * sin).astype(second.dtype)

    if turned:
        row = _counted(packed_ref.shape[1] * group)
        head, member = row // group, row % group
        for part, x in zip(halves, turn(*(packed_ref[b, head, member, part] for part in halves)), strict=True):
            query_ref[b, head, member, part] = x

    @pl.when(place >= 0)
    def _():
        moved_ref[b] = at + 1

    @pl.when((place >= 0) & (at < position_ref.shape[2]))
    def _():
        head = _counted(key_ref.shape[1])
        key_row, value_row = (
            at if sinks is None else copy_row(at, sinks, ref.shape[2]) for ref in (key_ref, value_ref)
        )
        for part, x in zip(halves, turn(*(packed_ref[b, head, group, part] for part in halves)), strict=True):
            key_ref[b, head, key_row, part] = x
        for part in halves:
            value_ref[b, head, value_row, part] = packed_ref[b, head, group + 1, part]
        position_ref[b, head, at] = jnp.full(head.shape, place, jnp.int32)


def _counted(count):
    """0..count-1 as a block, which must be a power of two: the last is repeated, and written again with the same value."""
    return jnp.minimum(jnp.arange(pl.next_power_of_2(count), dtype=jnp.int32), count - 1)


def store_token(
    key, value, place, *, cache_key, cache_value, cache_position, cursor, query, inv_freq, rows=None, interpret=False
):
    """See ``pallas_kernels.store_token.store_token``; ``interpret=True`` runs anywhere, slowly."""
    batch = key.shape[0]
    turned = query is not None
    # With the token axis that the projection's slices had, so that XLA sees neighbours joined again and copies nothing.
    parts = [key[:, :, None, None], value[:, :, None, None]]
    packed = jnp.concatenate([query[:, :, :, None], *parts] if turned else parts, axis=2)[..., 0, :]
    small = [packed, place, cursor, *([inv_freq] if turned else [])]
    caches = [cache_key, cache_value, cache_position]
    operands = [*small, *caches]
    written = [*caches, cursor]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written]
    if turned:
        shapes.append(jax.ShapeDtypeStruct(query.shape, query.dtype))
    group = query.shape[2] if turned else 0
    out = triton_call(
        functools.partial(_kernel, group=group, turned=turned, sinks=sinks_of(rows)),
        grid=(batch,),
        out_shape=tuple(shapes),
        input_output_aliases={len(small): 0, len(small) + 1: 1, len(small) + 2: 2, 2: 3},
        name="store_token",
        num_warps=8,
        num_stages=1,
        interpret=interpret,
    )(*operands)
    return *out[:4], out[4] if turned else None


def check(key, value, place, *, cache_key, cache_value, cache_position, cursor, query, inv_freq, rows=None):
    """Raise ``NotImplementedError`` for rows that are no block of registers."""
    heads, dim = key.shape[1:]
    if dim & (dim - 1):
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two")
    if query is not None and heads * query.shape[2] * dim > MOST_ELEMENTS:
        raise NotImplementedError(f"got query {query.shape}, expected at most {MOST_ELEMENTS} elements per row")
