"""Decode attention over packed blocks and the buffer of raw tokens: one kernel for the parts, one to join them.

A program takes a share of one list of blocks. The list ascends, so its tokens lie in one segment or in a few consecutive
segments, and each segment has a basis of its own. The program goes through its segments and writes one partial for each, in
the segment's basis. Program j writes the partial of segment s to row ``j + s`` of the partials. Shares and segments ascend
together, so every row is written exactly once. One more program attends to the buffer. The joining kernel weighs the
partials, projects the sum of each segment back onto the model's basis, and adds the partial of the buffer.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.block_specs import of_list
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.online_softmax import add_block, nothing, result
from pallas_kernels._triton.packed_vectors import check_format, owner_of, unpack_tile
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.shared_memory import check_fits
from pallas_kernels.numerics import LOG2_E, finite_or_zero, product_precision

PROGRAMS = 528  # four per streaming multiprocessor of an H100 or H200
LEAST_SPLITS = 9  # where the lists have as many tiles: with 128 lists 10 % faster than 5 splits, not slower than 26
FEW = 32  # lists that the joining kernel divides finely, to fill the GPU
JOIN_WARPS = 8  # warps per program of the joining kernel
LEAST = 8  # columns of a product on tensor cores: with fewer, Triton's compiler ends the process
BASES = 4  # segments whose bases a program of the joining kernel reads at once


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        tile: tokens unpacked at once, a power of two of at least 16.
        splits: programs per list, not counting the program of the buffer.
        num_warps: warps per program.
    """

    tile: int = 64
    splits: int = 1
    num_warps: int = 4


def default_config(lists: int, blocks: int, granule: int) -> Config:
    """Choose a config for B*H ``lists`` of ``blocks``: enough splits to fill the GPU, and a tile or more for each."""
    tile = max(Config.tile, pl.next_power_of_2(granule))
    per_tile = tile // granule
    tiles = pl.cdiv(max(blocks, 1), per_tile)
    splits = min(tiles, max(pl.cdiv(PROGRAMS, lists), LEAST_SPLITS))
    return Config(tile=tile, splits=pl.cdiv(tiles, pl.cdiv(tiles, splits)))


def _packed(j, refs, owner_ref, out_ref, lse_ref, segment_ref, *, tile, splits, share, granule, span, scale, terms):
    """Attend to the share of the listed blocks of program j, and write one partial per segment."""
    parts_ref, key_ref, key_words_ref, value_ref, value_words_ref, blocks_ref, count_ref, last_ref = refs
    segments, listed, per_tile = parts_ref.shape[0], blocks_ref.shape[0], tile // granule
    group = parts_ref.shape[1] // terms
    rank = key_ref.shape[0] // key_words_ref.shape[0]
    precision = product_precision(value_ref.dtype)
    count = count_ref[0]
    first = j * share  # entries first..stop - 1 of the list are this program's
    stop = jnp.minimum(first + share, count)

    def owner_at(entry):  # behind the list this is the last segment, so that the last rows get written too
        owner = owner_of(blocks_ref[jnp.minimum(entry, listed - 1)], owner_ref, last_ref, span)
        return jnp.where(entry < count, owner, segments - 1)

    # This program's segments go from the segment of its first entry to the segment of the next share's first entry, both
    # included. The first program begins at segment 0, and the last one ends at the last segment. Two neighbours may share a
    # segment, but they write it to different rows. A segment without an entry gets an empty partial.
    entries = first + jnp.arange(pl.next_power_of_2(share), dtype=jnp.int32)
    mine = jnp.where(entries < stop, owner_at(entries), segments)  # the segment of each entry; ascends
    low = jnp.where(j == 0, 0, owner_at(first))
    high = jnp.where(j == splits - 1, segments - 1, owner_at(first + share))
    number = jnp.arange(tile, dtype=jnp.int32)

    def attend(s, begin):
        """Attend to segment s, entries begin..end - 1 of the list, and return where the next segment begins."""
        end = first + jnp.sum((mine <= s).astype(jnp.int32))
        query = parts_ref[s, :, :]

        def add(step, sums):
            total, maximum, out = sums
            entry = begin + step * per_tile + number // granule
            seen = (entry < end) & (number < per_tile * granule)
            # Entries past the last listed block repeat it, so that no row out of range is read.
            slot = blocks_ref[jnp.minimum(entry, end - 1)] * granule + number % granule
            # Both bitmaps are loaded now: the values' bitmap arrives while the keys are unpacked.
            words, value_words = key_words_ref[slot, :], value_words_ref[slot, :]
            keys = unpack_tile(key_ref, words, slot, rank)
            # The rows of this product are tokens, and the rows of the next one channels. Tensor cores need 16 rows or more,
            # which four query heads would not fill.
            logits = plt.dot(keys, query, trans_b=True, precision=precision)
            # The terms of a query add up to its float32 value. Powers of 2 are cheaper than powers of e.
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
        # The sums have every head `copies` times, which makes enough columns for a product; their mean is the result.
        copies = out.shape[1] // group
        out = jnp.sum(out.reshape(dim, group, copies), axis=2) / (copies * jnp.where(total > 0, total, 1))[None]
        out_ref[j + s, :, :] = out.T
        lse_ref[j + s, :] = (finite_or_zero(maximum) + jnp.log2(total)) / LOG2_E
        segment_ref[j + s] = s
        return end

    lax.fori_loop(low, high + 1, attend, first)


def _repeat(x):
    """Repeat every column of x [N, G] until there are `LEAST` columns; copies of a column stand side by side."""
    while x.shape[1] < LEAST:
        x = jnp.stack([x, x], axis=-1).reshape(x.shape[0], -1)
    return x


def _recent(refs, out_ref, lse_ref, segment_ref, *, size, scale, group):
    """Attend to the raw tokens of the buffer, and write the last row of the partials."""
    query_ref, key_ref, value_ref, position_ref = refs
    precision = product_precision(query_ref.dtype)
    slots, last_row = key_ref.shape[0], out_ref.shape[0] - 1
    # Heads that pad the group repeat its last head.
    heads = jnp.minimum(jnp.arange(out_ref.shape[1], dtype=jnp.int32), group - 1)
    query = query_ref[heads, :]

    def add(step, sums):
        number = step * size + jnp.arange(size, dtype=jnp.int32)
        slot = jnp.minimum(number, slots - 1)
        seen = (number < slots) & (position_ref[slot] >= 0)
        # A slot without a token may hold NaN, which a weight of 0 would not remove.
        keys, values = (jnp.where(seen[:, None], ref[slot, :], 0) for ref in (key_ref, value_ref))
        logits = plt.dot(query, keys, trans_b=True, precision=precision) * scale
        return add_block(sums, jnp.where(seen[None], logits, -jnp.inf), values, precision)

    out, lse = result(lax.fori_loop(0, pl.cdiv(slots, size), add, nothing(out_ref.shape[1], out_ref.shape[2])))
    out_ref[last_row, :, :] = out
    lse_ref[last_row, :] = lse
    segment_ref[last_row] = -1  # no segment: the partial is in the model's basis


def _attend(*refs, has_owner, splits, tile, group, scale, **static):
    # Operands, of one list:
    #   parts [M, Gp * N, D]
    #   keys [S * r] and their words [S, W], values [S * r] and their words [S, W]
    #   blocks [K]
    #   count, last [1]
    #   query [G, D]
    #   the buffer's key and value [R, D] and position [R]
    #   owner [P] if given
    # Results, a row per partial: out [X, Gp, D], lse [X, Gp] and segment [X].
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


def _join(
    out_ref,  # [X, Gp, D]
    lse_ref,  # [X, Gp]
    segment_ref,  # [X]
    basis_ref,  # [M, D, D]
    merged_ref,  # [G, D]
    *,
    width,
):
    # The refs are one list's. A program computes `width` columns of one head.
    head, at = pl.program_id(1), pl.program_id(2)
    rows, segments = lse_ref.shape[0], basis_ref.shape[0]
    number = jnp.arange(pl.next_power_of_2(rows), dtype=jnp.int32)
    row = jnp.minimum(number, rows - 1)
    columns = pl.ds(at * width, width)
    # Every load is issued before the first sum, because threads wait for each other in a sum.
    out, segment = out_ref[row, head, :], segment_ref[row]
    newest = out_ref[rows - 1, head, columns]
    lse = jnp.where(number < rows, lse_ref[row, head], -jnp.inf)
    # The weight of each partial in the whole softmax; partials without a token have lse -inf and weight 0.
    weight = jnp.exp(lse - finite_or_zero(jnp.max(lse)))
    total = jnp.sum(weight)
    weight = weight / jnp.where(total > 0, total, 1.0)
    out = jnp.where((weight > 0)[:, None], out, 0.0) * weight[:, None]

    def add(step, merged):
        """Project the sums of a few segments back; a segment past the last one reads a basis, but has no partial."""
        some = [step * BASES + i for i in range(min(BASES, segments))]
        bases = [basis_ref[jnp.minimum(s, segments - 1), :, columns] for s in some]
        for s, basis in zip(some, bases, strict=True):
            mine = jnp.sum(jnp.where((segment == s)[:, None], out, 0.0), axis=0)
            merged = merged + mine[:, None] * basis
        return merged

    dim = out_ref.shape[2]
    merged = lax.fori_loop(0, pl.cdiv(segments, BASES), add, jnp.zeros((dim, width), jnp.float32))
    # The partial of the buffer is the last one. It is in the model's basis already.
    raw = newest * jnp.sum(jnp.where(number == rows - 1, weight, 0.0))
    merged_ref[head, columns] = (jnp.sum(merged, axis=0) + raw).astype(merged_ref.dtype)


def packed_attention(
    parts, query, key, value, basis, blocks, count, last, recent, *, scale, granule, span, owner,
    config: Config | None = None, interpret=False,
):  # fmt: skip
    """Attend to the listed packed blocks and the raw buffer in one softmax; ``interpret=True`` runs anywhere, slowly."""
    rows, heads, segments, group, terms, dim = parts.shape
    lists, listed, slots = rows * heads, blocks.shape[2], key[0].shape[2]
    config = default_config(lists, listed, granule) if config is None else config
    tile = max(config.tile, pl.next_power_of_2(granule))
    per_tile = tile // granule
    share = pl.cdiv(pl.cdiv(max(listed, 1), per_tile), config.splits) * per_tile
    padded = max(pl.next_power_of_2(group), LEAST // terms)  # enough columns for a product on tensor cores
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
    # Row r, from 0 to splits + segments - 2, belongs to the pairs (j, s) with j + s = r; the last row belongs to the buffer.
    partial_rows = config.splits + segments
    shapes = [((partial_rows, padded, dim), jnp.float32), ((partial_rows, padded), jnp.float32)]
    shapes.append(((partial_rows,), jnp.int32))
    shapes = [jax.ShapeDtypeStruct((lists, *shape), dtype) for shape, dtype in shapes]
    partials = triton_call(
        functools.partial(
            _attend, has_owner=owner is not None, splits=config.splits, tile=tile, group=group, scale=scale,
            share=share, granule=granule, span=span, terms=terms,
        ),
        grid=(lists, config.splits + 1),
        in_specs=[of_list(x, lists // x.shape[0]) for x in operands],
        out_specs=[of_list(x, 1) for x in shapes],
        out_shape=shapes,
        name="packed_attention",
        num_warps=config.num_warps,
        num_stages=1,  # a pipeline would copy every gathered entry through shared memory
        interpret=interpret,
    )(*operands)  # fmt: skip
    basis = basis.reshape(lists, segments, dim, dim)
    merged = jax.ShapeDtypeStruct((lists, group, dim), query.dtype)
    width = 16 if lists <= FEW else min(64, dim)  # columns per program
    return triton_call(
        functools.partial(_join, width=width),
        grid=(lists, group, dim // width),
        in_specs=[of_list(x, 1) for x in (*partials, basis)],
        out_specs=of_list(merged, 1),
        out_shape=merged,
        name="packed_join",
        num_warps=JOIN_WARPS,
        num_stages=1,
        interpret=interpret,
    )(*partials, basis).reshape(query.shape)


def check(parts, query, key, value, basis, blocks, count, last, recent, *, scale, granule, span, owner):
    """Raise ``NotImplementedError`` for sizes and dtypes that the kernels do not take."""
    check_format(query.shape[-1], *(x.dtype for x in (parts, query, key[0], value[0], *recent[:2])))
    # The program of the buffer: a block of keys and of values, and the queries.
    rows = 2 * min(Config.tile, 64) + pl.next_power_of_2(max(query.shape[2], LEAST)) * parts.shape[4]
    check_fits(query.dtype.itemsize * query.shape[-1] * rows)
