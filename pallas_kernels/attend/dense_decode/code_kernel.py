"""The kernel of `pallas_triton` for bfloat16 queries and a cache in 8 or 4 bits: the same work, divided in the same way.

With half the bytes or fewer, instructions would limit it unless each code takes few (`pallas_kernels._triton.code_products`).
So its softmax is in powers of two, and the denominator is added up over slots only at the end.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton import code_products as codes
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.split import blocks_to_read
from pallas_kernels.attend.dense_decode.queries import asked_positions, store_first, visible
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.numerics import LOG2_E, finite_or_zero

STAGES = 4  # of the pipeline: a block has half the bytes, and as many bytes must be on their way
TILE = 16  # query rows of a product, at most; codes are read and values converted once for all products of a block
MOST_ROWS = 64  # query heads of a KV head, times queries; sums for more fill the registers


def takes(query: jax.Array, key: Any, value: Any) -> bool:
    """Tell whether this kernel runs for a query, keys and values that the check of "pallas_triton" accepts."""
    group, width = math.prod(query.shape[2:-1]), key.shape[3]
    return (
        isinstance(key, Quantised)
        and isinstance(value, Quantised)
        and not key.grouped
        and (value.packed or not value.grouped)
        and query.dtype == jnp.bfloat16
        and group <= MOST_ROWS
        and not width & (width - 1)
        and width >= codes.LEAST_WIDTH * (2 if key.packed else 1)
        and value.shape[3] >= codes.LEAST_WIDTH * (2 if value.packed else 1)
    )


def needed(group: int, width: int, dim: int, stages: int, block: int) -> int:
    """Estimate the bytes of shared memory that the kernel needs."""
    rows = pl.cdiv(group, TILE) * _tile_rows(group)
    # The pipeline's blocks, with scales and a position for each slot; the queries; the weights of a block.
    return block * (stages - 1) * (width + dim + 14) + 2 * rows * 2 * (width + block)


def _tile_rows(group: int) -> int:
    """Count the rows of each product for ``group`` query rows: a power of two."""
    return max(codes.ROWS, pl.next_power_of_2(min(group, TILE)))


def operands(key: Quantised, value: Quantised) -> tuple[jax.Array, ...]:
    """Prepare the operands that `kernel` takes for keys and values."""
    scale = codes.words(value.scale) if value.grouped else value.scale
    return codes.key_operand(key.codes), key.scale, codes.pairs(value.codes), scale


def _value_scales(ref, at, held, grouped):
    """Read the scales of a block's values, float32, one for a slot or for each group of channels; 0 where not ``held``."""
    if grouped:
        return codes.scales_of([jnp.where(held, ref[*at, i], 0) for i in (0, 1)])
    return [jnp.where(held, ref[at].astype(jnp.float32), 0)]


def kernel(*refs, structure, scale, block, kinds, interpret):
    """Do what `pallas_triton`'s kernel does, on the `operands` of keys and values, whose codes have these ``kinds``."""
    refs, (out_ref, lse_ref, *logits_ref) = refs[: structure.num_leaves], refs[structure.num_leaves :]
    query_ref, stored, position_ref, limit_ref, partials, gap_ref, asked_ref = jax.tree.unflatten(structure, refs)
    key_ref, key_scale_ref, value_ref, value_scale_ref = stored
    b, h, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    heads, group = query_ref.shape[1:3]
    slots, splits, dim = key_ref.shape[2], out_ref.shape[1], out_ref.shape[3]
    key_kind, value_kind = kinds
    grouped = len(value_scale_ref.shape) > len(key_scale_ref.shape)
    rows = _tile_rows(group)
    fold = 2 if rows == codes.ROWS else 1  # the output has 16 rows at least, too

    def tile(first):
        head = jnp.minimum(jnp.arange(first, first + rows, dtype=jnp.int32), group - 1)  # the last head is repeated
        query, factor = codes.query_operand(query_ref, (b, h), head, key_kind)
        return head, query, factor * (scale * LOG2_E), asked_positions(asked_ref, b, head)

    tiles = [tile(first) for first in range(0, group, rows)]
    limit, blocks, block_number = blocks_to_read(limit_ref, gap_ref, (b, h), slots, block)

    def add(step, sums):
        step = block_number(step)
        # If the block size does not divide S, the last block starts early; slots that the block before had are hidden.
        start = jnp.minimum(step * block, slots - block)
        at = b, h, pl.ds(start, block)
        slot = start + jnp.arange(block, dtype=jnp.int32)
        position = position_ref[at]
        held = (position >= 0) & (slot >= step * block) & (slot < limit)
        keys = key_ref[*at, :]
        products = [codes.logits(query, keys, rows, key_kind, interpret) for _, query, _, _ in tiles]
        products = [x * factor[:, None] for x, (_, _, factor, _) in zip(products, tiles, strict=True)]
        key_scale = key_scale_ref[at].astype(jnp.float32)[None, :]

        def hidden(product, head, asked):
            # This removes the NaN of a hidden scale. A hidden value has finite codes, and its scale becomes 0.
            logits = jnp.where(visible(held, position, asked), product * key_scale, -jnp.inf)
            store_first(logits_ref, (b, h), head, slot, logits * math.log(2), held, asked_ref)
            return logits

        every = [hidden(x, head, asked) for x, (head, _, _, asked) in zip(products, tiles, strict=True)]
        value_scales = _value_scales(value_scale_ref, at, held, grouped)

        def weighted(logits, maximum):
            risen = jnp.maximum(maximum, jnp.max(logits, axis=1))
            shift = finite_or_zero(risen)
            decay = codes.exp2(maximum - shift, interpret)
            weight = codes.exp2(logits - shift[:, None], interpret)
            shares = [codes.folded((weight * x[None, :]).astype(jnp.bfloat16), fold) for x in value_scales]
            return risen, decay, weight, shares

        found = [weighted(logits, maximum) for logits, (_, maximum, _) in zip(every, sums, strict=True)]
        channels = codes.values(value_ref[*at, :], value_kind, interpret)

        def added(total, outs, risen, decay, weight, shares):
            kept = codes.folded(decay, fold)[:, None]
            shares = shares if grouped else shares * len(channels)
            outs = tuple(out * kept + plt.dot(share, x) for out, share, x in zip(outs, shares, channels, strict=True))
            return total * decay[:, None] + weight, risen, outs

        return [added(total, outs, *more) for (total, _, outs), more in zip(sums, found, strict=True)]

    places = [codes.folded(head, fold)[:, None] for head, *_ in tiles]
    pieces, unit = [x[None, :] for x in codes.channels(value_kind, dim)], codes.UNIT[value_kind]

    def begun(head, row):
        total = jnp.zeros((rows, block), jnp.float32)  # a sum for each place in a block
        maximum = jnp.full((rows,), -jnp.inf, jnp.float32)  # of logits to base 2
        outs = tuple(jnp.zeros((fold * rows, piece.shape[1]), jnp.float32) for piece in pieces)
        if partials is not None:
            out_partial, lse_partial = partials
            maximum = jnp.where(split == 0, lse_partial[b, h, head], -jnp.inf) * LOG2_E
            total = jnp.where((maximum > -jnp.inf)[:, None] & (jnp.arange(block, dtype=jnp.int32)[None, :] == 0), 1.0, 0.0)
            some = codes.folded(maximum, fold)[:, None] > -jnp.inf  # elsewhere the partial may hold anything
            outs = tuple(jnp.where(some, out_partial[b, h, row, piece].astype(jnp.float32) * unit, 0) for piece in pieces)
        return total, maximum, outs

    # Program `split` takes blocks first..last - 1 of the row.
    sums = [begun(head, row) for (head, *_), row in zip(tiles, places, strict=True)]
    first, last = (lax.div((split + i) * blocks, splits) for i in (0, 1))
    sums = lax.fori_loop(first, last, add, sums)
    for (head, *_), row, (total, maximum, outs) in zip(tiles, places, sums, strict=True):
        total = jnp.sum(total, axis=1)
        divisor = codes.folded(jnp.where(total > 0, total, 1) * unit, fold)[:, None]
        # Repeated query heads write equal values to the same address.
        for out, piece in zip(outs, pieces, strict=True):
            out_ref[b * heads + h, split, row, piece] = (out / divisor).astype(out_ref.dtype)
        lse_ref[b * heads + h, split, head] = finite_or_zero(maximum) * math.log(2) + jnp.log(total)
