"""Decode attention over packed blocks and the buffer of raw tokens: one kernel for the parts, one to join them.

A program takes a share of one list of blocks. Its tokens lie in one segment or a few that ascend, each with a basis of its
own: it goes through them one by one and writes one partial for each, in that segment's basis. Program j writes the partial of
segment s at place ``j + s``: since shares and segments ascend together, every place is written once. One more program attends
to the buffer. The joining kernel weighs the partials, turns the sum of each segment back, and adds the buffer's.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.merge.online import add_block, nothing, result
from pallas_kernels.numerics import finite_or_zero, product_precision
from pallas_kernels.packed_attention.score import owner_of
from pallas_kernels.packed_attention.tile import unpack_tile
from pallas_kernels.triton_call import triton_call

PROGRAMS = 528  # four per streaming multiprocessor of an H100 or H200
COLUMNS = 16  # of the output per program of the joining kernel
JOIN_WARPS = 8
LEAST = 8  # columns of a product on tensor cores; with fewer Triton's compiler ends the process
LOG2_E = math.log2(math.e)
TURNS = 4  # segments whose bases a program of it reads at once


@dataclasses.dataclass(frozen=True)
class Config:
    """How the list is cut.

    Attributes:
        tile: tokens unpacked at once, a power of two of at least 16.
        splits: programs per list, the buffer's not counted.
        num_warps: warps per program.
    """

    tile: int = 64
    splits: int = 1
    num_warps: int = 4


def default_config(lists: int, blocks: int, granule: int) -> Config:
    """Config for ``lists`` B*H of ``blocks`` blocks: enough splits to fill the GPU, none without a tile of its own."""
    tile = max(Config.tile, pl.next_power_of_2(granule))
    per_tile = tile // granule
    tiles = pl.cdiv(max(blocks, 1), per_tile)
    splits = min(tiles, pl.cdiv(PROGRAMS, lists))
    return Config(tile=tile, splits=pl.cdiv(tiles, pl.cdiv(tiles, splits)))


def _packed(j, refs, owner_ref, out_ref, lse_ref, segment_ref, *, tile, splits, share, granule, span, scale, terms):
    parts_ref, key_ref, key_words_ref, value_ref, value_words_ref, blocks_ref, count_ref, last_ref = refs
    segments, listed, per_tile = parts_ref.shape[0], blocks_ref.shape[0], tile // granule
    group = parts_ref.shape[1] // terms
    rank = key_ref.shape[0] // key_words_ref.shape[0]
    precision = product_precision(value_ref.dtype)
    count = count_ref[0]
    first = j * share
    stop = jnp.minimum(first + share, count)

    def owner_at(entry):  # beyond the list: the last segment, so that the last place gets written
        owner = owner_of(blocks_ref[jnp.minimum(entry, listed - 1)], owner_ref, last_ref, span)
        return jnp.where(entry < count, owner, segments - 1)

    entries = first + jnp.arange(pl.next_power_of_2(share), dtype=jnp.int32)
    mine = jnp.where(entries < stop, owner_at(entries), segments)  # ascends
    low = jnp.where(j == 0, 0, owner_at(first))
    high = jnp.where(j == splits - 1, segments - 1, owner_at(first + share))
    number = jnp.arange(tile, dtype=jnp.int32)

    def attend(s, begin):
        end = first + jnp.sum((mine <= s).astype(jnp.int32))
        query = parts_ref[s, :, :]

        def add(step, sums):
            total, maximum, out = sums
            entry = begin + step * per_tile + number // granule
            seen = (entry < end) & (number < per_tile * granule)
            slot = blocks_ref[jnp.minimum(entry, end - 1)] * granule + number % granule  # a listed one in any case
            # Asked for with the keys' bitmaps: they come while the keys are worked on.
            words, value_words = key_words_ref[slot, :], value_words_ref[slot, :]
            keys = unpack_tile(key_ref, words, slot, rank)
            # Rows are tokens here and channels below: tensor cores take 16 at least, which four heads would not fill.
            logits = plt.dot(keys, query, trans_b=True, precision=precision)
            logits = jnp.sum(logits.reshape(tile, group, terms), axis=2) * (scale * LOG2_E)
            logits = jnp.where(seen[:, None], logits, -jnp.inf)
            risen = jnp.maximum(maximum, jnp.max(logits, axis=0))
            shift = finite_or_zero(risen)
            decay, weight = jnp.exp2(maximum - shift), jnp.exp2(logits - shift[None])
            values = unpack_tile(value_ref, value_words, slot, rank)
            added = plt.dot(values, _repeat(weight.astype(values.dtype)), trans_a=True, precision=precision)
            return total * decay + jnp.sum(weight, axis=0), risen, out * _repeat(decay[None]) + added

        dim = out_ref.shape[2]
        sums = (*nothing(group, dim)[:2], jnp.zeros((dim, max(group, LEAST)), jnp.float32))
        total, maximum, out = lax.fori_loop(0, pl.cdiv(end - begin, per_tile), add, sums)
        copies = out.shape[1] // group
        out = jnp.sum(out.reshape(dim, group, copies), axis=2) / (copies * jnp.where(total > 0, total, 1))[None]
        out_ref[j + s, :, :] = out.T
        lse_ref[j + s, :] = (finite_or_zero(maximum) + jnp.log2(total)) / LOG2_E
        segment_ref[j + s] = s
        return end

    lax.fori_loop(low, high + 1, attend, first)


def _repeat(x):
    """x [N, G] with every column as often as makes `LEAST` columns, each copy beside the last."""
    while x.shape[1] < LEAST:
        x = jnp.stack([x, x], axis=-1).reshape(x.shape[0], -1)
    return x


def _recent(refs, out_ref, lse_ref, segment_ref, *, size, scale, group):
    query_ref, key_ref, value_ref, position_ref = refs
    precision = product_precision(query_ref.dtype)
    slots, place = key_ref.shape[0], out_ref.shape[0] - 1
    heads = jnp.minimum(jnp.arange(out_ref.shape[1], dtype=jnp.int32), group - 1)
    query = query_ref[heads, :]

    def add(step, sums):
        number = step * size + jnp.arange(size, dtype=jnp.int32)
        slot = jnp.minimum(number, slots - 1)
        seen = (number < slots) & (position_ref[slot] >= 0)
        keys, values = (jnp.where(seen[:, None], ref[slot, :], 0) for ref in (key_ref, value_ref))
        logits = plt.dot(query, keys, trans_b=True, precision=precision) * scale
        return add_block(sums, jnp.where(seen[None], logits, -jnp.inf), values, precision)

    out, lse = result(lax.fori_loop(0, pl.cdiv(slots, size), add, nothing(out_ref.shape[1], out_ref.shape[2])))
    out_ref[place, :, :] = out
    lse_ref[place, :] = lse
    segment_ref[place] = -1


def _attend(*refs, has_owner, splits, tile, group, scale, **static):
    # parts [M, Gp * N, D]; keys and values [S * r] and words [S, W]; blocks [K]; count, last [1]; query [G, D];
    # the buffer's key and value [R, D] and position [R]; owner [P]; out [X, Gp, D]; lse [X, Gp]; segment [X]
    *operands, out_ref, lse_ref, segment_ref = refs
    owner_ref = operands.pop() if has_owner else None
    outputs = out_ref, lse_ref, segment_ref
    j = pl.program_id(1)

    @pl.when(j < splits)
    def _():
        _packed(j, operands[:8], owner_ref, *outputs, tile=tile, splits=splits, scale=scale, **static)

    @pl.when(j == splits)
    def _():
        _recent(operands[8:], *outputs, size=max(16, min(tile, 64)), scale=scale, group=group)


def _join(out_ref, lse_ref, segment_ref, basis_ref, merged_ref):
    # out [X, Gp, D]; lse [X, Gp]; segment [X]; basis [M, D, D]; merged [G, D]
    head, at = pl.program_id(1), pl.program_id(2)
    places, segments = lse_ref.shape[0], basis_ref.shape[0]
    number = jnp.arange(pl.next_power_of_2(places), dtype=jnp.int32)
    place = jnp.minimum(number, places - 1)
    columns = pl.ds(at * COLUMNS, COLUMNS)
    # All that is read is asked for before the first sum, which the threads wait for each other for.
    out, segment = out_ref[place, head, :], segment_ref[place]
    newest = out_ref[places - 1, head, columns]
    lse = jnp.where(number < places, lse_ref[place, head], -jnp.inf)
    weight = jnp.exp(lse - finite_or_zero(jnp.max(lse)))
    total = jnp.sum(weight)
    weight = weight / jnp.where(total > 0, total, 1.0)
    out = jnp.where((weight > 0)[:, None], out, 0.0) * weight[:, None]

    def add(step, merged):
        some = [step * TURNS + i for i in range(min(TURNS, segments))]
        bases = [basis_ref[jnp.minimum(s, segments - 1), :, columns] for s in some]
        for s, basis in zip(some, bases, strict=True):
            mine = jnp.sum(jnp.where((segment == s)[:, None], out, 0.0), axis=0)
            merged = merged + mine[:, None] * basis
        return merged

    dim = out_ref.shape[2]
    merged = lax.fori_loop(0, pl.cdiv(segments, TURNS), add, jnp.zeros((dim, COLUMNS), jnp.float32))
    # The buffer's partial, the last one, is in the model's own basis.
    raw = newest * jnp.sum(jnp.where(number == places - 1, weight, 0.0))
    merged_ref[head, columns] = (jnp.sum(merged, axis=0) + raw).astype(merged_ref.dtype)


def list_spec(x: jax.Array, per: int) -> pl.BlockSpec:
    """One list's part of an operand with axis B*H, or a row's of one with axis B (``per`` lists each): all of it."""
    return pl.BlockSpec((None, *x.shape[1:]), lambda i, j, *_: (i // per,) + (0,) * (len(x.shape) - 1))


def packed_attention(
    parts, query, key, value, basis, blocks, count, last, recent, *, scale, granule, span, owner,
    config: Config | None = None, interpret=False,
):  # fmt: skip
    """See ``pallas_kernels.packed_attention.packed_attention``; ``interpret=True`` runs anywhere, slowly."""
    rows, heads, segments, group, terms, dim = parts.shape
    lists, listed, slots = rows * heads, blocks.shape[2], key[0].shape[2]
    config = default_config(lists, listed, granule) if config is None else config
    tile = max(config.tile, pl.next_power_of_2(granule))
    per_tile = tile // granule
    share = pl.cdiv(pl.cdiv(max(listed, 1), per_tile), config.splits) * per_tile
    padded = max(pl.next_power_of_2(group), LEAST // terms)
    if padded > group:
        parts = jnp.pad(parts, [(0, 0)] * 3 + [(0, padded - group), (0, 0), (0, 0)])
    operands = [
        parts.reshape(lists, segments, padded * terms, dim),
        *(y for x in (key, value) for y in (x[0].reshape(lists, -1), x[1].reshape(lists, slots, -1))),
        blocks.reshape(lists, listed),
        count.reshape(lists, 1),
        last.reshape(rows, 1),
        query.reshape(lists, group, dim),
        *(x.reshape(lists, *x.shape[2:]) for x in recent),
    ] + ([] if owner is None else [owner])
    places = config.splits + segments
    shapes = [((places, padded, dim), jnp.float32), ((places, padded), jnp.float32), ((places,), jnp.int32)]
    shapes = [jax.ShapeDtypeStruct((lists, *shape), dtype) for shape, dtype in shapes]
    partials = triton_call(
        functools.partial(
            _attend, has_owner=owner is not None, splits=config.splits, tile=tile, group=group, scale=scale,
            share=share, granule=granule, span=span, terms=terms,
        ),
        grid=(lists, config.splits + 1),
        in_specs=[list_spec(x, lists // x.shape[0]) for x in operands],
        out_specs=[list_spec(x, 1) for x in shapes],
        out_shape=shapes,
        name="packed_attention",
        num_warps=config.num_warps,
        num_stages=1,  # a pipeline would copy every gathered entry through shared memory
        interpret=interpret,
    )(*operands)  # fmt: skip
    basis = basis.reshape(lists, segments, dim, dim)
    merged = jax.ShapeDtypeStruct((lists, group, dim), query.dtype)
    return triton_call(
        _join,
        grid=(lists, group, dim // COLUMNS),
        in_specs=[list_spec(x, 1) for x in (*partials, basis)],
        out_specs=list_spec(merged, 1),
        out_shape=merged,
        name="packed_join",
        num_warps=JOIN_WARPS,
        num_stages=1,
        interpret=interpret,
    )(*partials, basis).reshape(query.shape)
