"""Collision votes as four Pallas Triton kernels: vote tables, votes of all keys, the cut, the candidates as a list.

1. Tables, one program per list and slice: 8 channels of the rotated query, the scores of the slice's 256 clusters, how many
   keys are in better ones (all pairs: no sort), and so the votes of each cluster.
2. Votes, programs over blocks of keys: every key looks its clusters up in its list's tables, 256 bytes per slice, so that
   lookups stay in the first-level cache. A thread has few keys, so that many threads have ids on their way. A few operations
   on words of four votes count how many reach 0, 8, 16, ... votes: a full histogram would cost more than the lookups.
3. Fine, the same blocks: between which of those the cut is, and how many keys reach each number of votes there.
4. Candidates, the same blocks: the counts of all blocks say where the cut is, and where in the list the block's own
   candidates go. Nothing is sorted, nothing depends on which program runs first.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.collision.reference import CLUSTERS, SLICE, portion
from pallas_kernels.triton_call import triton_call

PROGRAMS = 528  # four per streaming multiprocessor of an H100 or H200
MOST_BLOCKS = 128  # per list: every program of the last kernels reads the counts of all blocks
BYTES = 4  # votes per word
EACH_BYTE = 0x01010101
COARSE = 8  # votes are counted at multiples of this, then between two of them
LEVELS = 16  # counts per block, each of the votes that reach some number
MOST_VOTES = 126  # a byte holds votes + 1, 0 for keys that are not asked, and the eighth bit is needed
PAIRS = 16  # rivals compared with all clusters at once
WIDTH = 128  # words counted at once
_FOLD = 16  # bits that two counts share in one word while they are summed


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
        block: keys per program, a power of two, a multiple of ``part``.
        part: keys that a program votes on at once, a power of two of at least 64.
        tile: keys whose place in the list a program finds at once, a power of two of at least 64; no more than ``block``.
        num_warps: warps per program that votes.
        tables_warps: warps per program that makes a table.
    """

    block: int = 2048
    part: int = 256
    tile: int = 1024
    num_warps: int = 8
    tables_warps: int = 4

    def __post_init__(self):
        powers = all(size >= 64 and not size & (size - 1) for size in (self.block, self.part, self.tile))
        if not powers or self.part > self.block or self.block > 1 << (_FOLD - 1):
            raise ValueError(f"collision: got {self}, expected powers of two, part at most block, block <= 32768")


def default_config(lists: int, slots: int) -> Config:
    """Config for B*H ``lists`` of ``slots`` keys: enough blocks to fill the GPU, not so many that their counts weigh."""
    blocks = min(max(pl.cdiv(PROGRAMS, lists), 4), MOST_BLOCKS)
    block = pl.next_power_of_2(max(pl.cdiv(slots, blocks), 1024))
    if pl.cdiv(slots, block) > MOST_BLOCKS:
        block *= 2
    return Config(block=min(block, 1 << (_FOLD - 1)))


def _tables_kernel(*refs, rotate, capacity):
    query_ref, *signs_ref, counts_ref, shares_ref, table_ref, rotated_ref, zone_ref, count_ref = refs
    b, h, n = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    group, dim = query_ref.shape[2:]
    # All that is read is asked for before anything waits.
    held = counts_ref[b, h, n, :]
    query = [query_ref[b, h, g, :] for g in range(group)]
    signs = [x[:] for x in signs_ref]
    pieces, columns = shares_ref.shape
    shares = [[shares_ref[i, column] for i in range(pieces)] for column in range(columns)]
    query = sum(x.astype(jnp.float32) for x in query) / group
    if rotate:
        query = query * signs[0]
    row, channel = jnp.arange(SLICE, dtype=jnp.int32), jnp.arange(dim, dtype=jnp.int32)[None, :]
    at = n * SLICE + row[:, None]
    if rotate:  # row of the Hadamard matrix: the parity of the bits that both numbers have
        odd = (lax.population_count(channel & at) & 1) == 1
        parts = jnp.where(odd, -query[None, :], query[None, :])
    else:
        parts = jnp.where(channel == at, query[None, :], 0.0)
    turned = jnp.sum(parts, axis=1)
    rotated_ref[b, h, pl.ds(n * SLICE, SLICE)] = turned

    turned = [jnp.sum(jnp.where(row == j, turned, 0.0)) for j in range(SLICE)]

    def scores(cluster):
        total = jnp.zeros(cluster.shape, jnp.float32)
        for j, y in enumerate(turned):
            total = total + jnp.where(((cluster >> j) & 1) == 1, y, -y)
        return total

    cluster = jnp.arange(CLUSTERS, dtype=jnp.int32)
    own = scores(cluster)[None, :]

    def compare(step, sums):
        rival = step * PAIRS + jnp.arange(PAIRS, dtype=jnp.int32)
        other, held = scores(rival)[:, None], counts_ref[b, h, n, pl.ds(step * PAIRS, PAIRS)][:, None]
        better = (other > own) | ((other == own) & (rival[:, None] < cluster[None, :]))
        return sums + jnp.where(better, held, 0)

    # Sums stay with their threads until the end: a sum over rivals in every step would cost more than comparing them.
    sums = lax.fori_loop(0, CLUSTERS // PAIRS, compare, jnp.zeros((PAIRS, CLUSTERS), jnp.int32))
    before = jnp.sum(sums, axis=0, dtype=jnp.int32)
    zone = jnp.sum(held, dtype=jnp.int32)

    def share(column):
        chosen = shares[column][0]
        for i in range(1, pieces):
            chosen = jnp.where(zone >= shares[0][i - 1], shares[column][i], chosen)
        return chosen

    votes = jnp.zeros((CLUSTERS,), jnp.int32)
    for column in range(2, columns):
        votes = votes + (before < portion(share(column), zone)).astype(jnp.int32)
    table_ref[b, h, pl.ds(n * CLUSTERS, CLUSTERS)] = votes.astype(jnp.uint8)

    @pl.when(n == 0)
    def _():
        zone_ref[b, h] = zone
        count_ref[b, h] = jnp.minimum(portion(share(1), zone), capacity)


def _votes_kernel(
    table_ref, ids_ref, position_ref, stop_ref, zone_ref, words_ref, reach_ref, *, first, part, width, interpret
):
    """Blocks of one list: all tables [B * H * N * 256], ids [S, N], position [S]; words [block / 4] and reach [LEVELS]."""
    b, h, program = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    (slots, slices), block = ids_ref.shape, words_ref.shape[0] * BYTES
    begin, stop = program * block, jnp.minimum(stop_ref[b], slots)
    holes = zone_ref[b, h] != stop - first  # then, and only then, some slot of the zone holds nothing
    table = ((b * zone_ref.shape[1] + h) * slices + jnp.arange(slices, dtype=jnp.int32)[None, :]) * CLUSTERS
    lane = jnp.arange(BYTES, dtype=jnp.int32)[None, :] * 8

    def rows(step):  # behind the block it is always the same row
        slot = begin + jnp.minimum(step * part + jnp.arange(part, dtype=jnp.int32), block - 1)
        return ids_ref[jnp.minimum(slot, slots - 1), :]

    def add(step, ids):
        ahead = rows(step + 1)  # on its way while this part is looked up
        found = table_ref[_entries(table, ids, interpret)]
        votes = jnp.sum(found.astype(jnp.int32), axis=1, dtype=jnp.int32)
        slot = begin + step * part + jnp.arange(part, dtype=jnp.int32)
        asked = (slot >= first) & (slot < stop)
        position = plt.load(position_ref.at[jnp.minimum(slot, slots - 1)], mask=asked & holes, other=0)
        votes = jnp.where(asked & (position >= 0), votes + 1, 0).reshape(part // BYTES, BYTES)
        words_ref[pl.ds(step * (part // BYTES), part // BYTES)] = jnp.sum(votes << lane, axis=1, dtype=jnp.int32)
        return ahead

    def nothing(step, carry):
        words_ref[pl.ds(step * (part // BYTES), part // BYTES)] = jnp.zeros((part // BYTES,), jnp.int32)
        return carry

    steps = jnp.clip(lax.div(stop - begin + (part - 1), part), 0, block // part)
    lax.fori_loop(0, steps, add, rows(0))
    lax.fori_loop(steps, block // part, nothing, 0)
    if not interpret:
        plt.debug_barrier()  # what is counted now, other threads wrote
    words, parts = _parts(words_ref, width)
    reach_ref[...] = _reached(words, parts, words(0), COARSE * jnp.arange(LEVELS, dtype=jnp.int32))


def _entries(table, ids, interpret):
    """Entries of clusters ids uint8 [P, N] in tables that begin at ``table`` int32 [1, N], multiples of 256: int32 [P, N].

    A byte picked out of four takes the place of the lowest byte of where its table begins: one instruction in place of two,
    a twelfth of the votes' time. It takes four bytes of one thread.
    """
    table = jnp.broadcast_to(table, ids.shape)
    if interpret or ids.shape[1] < BYTES:
        return table + ids.astype(jnp.int32)
    (entries,) = plt.elementwise_inline_asm(
        " ".join(f"prmt.b32 ${i}, $4, ${5 + i}, 0x765{i};" for i in range(4)),
        args=[ids, table],
        constraints="=r,=r,=r,=r,r,r,r,r,r",
        pack=4,
        result_shape_dtypes=[jax.ShapeDtypeStruct(ids.shape, jnp.int32)],
    )
    return entries


def _bars(votes):
    """What lifts a byte that counts votes + 1 to 128 if there are at least ``votes`` int32, in all four bytes."""
    return (127 - votes) * EACH_BYTE


def _parts(words_ref, width):
    """Words int32 [block / 4] in parts, each a few of [width] whose reads do not wait for each other; their number."""
    few = min(words_ref.shape[0] // width, 4)

    def words(part):
        return [words_ref[pl.ds((part * few + i) * width, width)] for i in range(few)]

    return words, words_ref.shape[0] // (width * few)


def _reached(words, parts, ahead, votes):
    """How many bytes of a block (`_parts`; ``ahead`` is the first) reach each of ``votes`` int32 [LEVELS]: int32 [LEVELS]."""
    bars = _bars(votes)[None, :]

    def count(sums, part):  # a byte has room: it is added to 64 times at most
        for words in part:
            sums = sums + (((words[:, None] + bars) >> 7) & EACH_BYTE)
        return sums

    sums = count(jnp.zeros((ahead[0].shape[0], LEVELS), jnp.int32), ahead)
    if parts > 1:
        sums = lax.fori_loop(1, parts, lambda part, sums: count(sums, words(part)), sums)
    pairs = (sums & 0x00FF00FF) + ((sums >> 8) & 0x00FF00FF)
    return jnp.sum((pairs & 0xFFFF) + ((pairs >> 16) & 0xFFFF), axis=0, dtype=jnp.int32)


def _fine_kernel(words_ref, reach_ref, count_ref, coarse_ref, fine_ref, *, most, rows, width):
    """The same blocks: words [block / 4], reach of all blocks [blocks, LEVELS]; coarse, the list's level; fine [LEVELS]."""
    b, h, program = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    words, parts = _parts(words_ref, width)
    ahead = words(0)  # does not wait for the level
    reach = _total(reach_ref, rows, reach_ref.shape[0])
    level = jnp.arange(LEVELS, dtype=jnp.int32)
    enough = (reach >= count_ref[b, h]) & (level * COARSE <= most)
    coarse = jnp.maximum(jnp.sum(enough.astype(jnp.int32), dtype=jnp.int32) - 1, 0)
    fine_ref[...] = _reached(words, parts, ahead, coarse * COARSE + level)

    @pl.when(program == 0)
    def _():
        coarse_ref[b, h] = coarse


def _total(counts_ref, rows, blocks):
    """Sum of the first ``blocks`` rows of counts [blocks, LEVELS]."""
    number = jnp.arange(rows, dtype=jnp.int32)
    counts = counts_ref[jnp.minimum(number, counts_ref.shape[0] - 1), :]
    return jnp.sum(jnp.where(number[:, None] < blocks, counts, 0), axis=0, dtype=jnp.int32)


def _candidates_kernel(words_ref, fine_ref, coarse_ref, count_ref, slots_ref, *, block, tile, rows):
    """The same blocks: words [block / 4], fine of all blocks [blocks, LEVELS]; slots [C] of the list."""
    b, h, program = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    size = tile // BYTES
    ahead = words_ref[pl.ds(0, size)]  # does not wait for the cut
    total, before = _total(fine_ref, rows, fine_ref.shape[0]), _total(fine_ref, rows, program)
    own, wanted = fine_ref[program, :], count_ref[b, h]
    level = jnp.arange(LEVELS, dtype=jnp.int32)
    enough = (total >= wanted) & (level < COARSE)
    fine = jnp.maximum(jnp.sum(enough.astype(jnp.int32), dtype=jnp.int32) - 1, 0)

    def at(counts, which):
        return jnp.sum(jnp.where(level == which, counts, 0), dtype=jnp.int32)

    left = wanted - at(total, fine + 1)
    above_before = at(before, fine + 1)
    level_before = at(before, fine) - above_before
    threshold = coarse_ref[b, h] * COARSE + fine
    bars, higher_bars = _bars(threshold), _bars(threshold + 1)

    def list_tile(step, carry):
        above_before, level_before, words = carry
        ahead = words_ref[pl.ds(jnp.minimum(step + 1, block // tile - 1) * size, size)] if tile < block else words
        above = ((words + higher_bars) >> 7) & EACH_BYTE
        level = (((words + bars) >> 7) & EACH_BYTE) - above
        # Times EACH_BYTE, a byte of a word is the sum of itself and the lower ones: ranks in the word, and its total.
        above_rank, level_rank = above * EACH_BYTE, level * EACH_BYTE
        one = ((above_rank >> 24) & 0xFF) + (((level_rank >> 24) & 0xFF) << _FOLD)
        sums = lax.cumsum(one) - one
        above_sum, level_sum = above_before + (sums & ((1 << _FOLD) - 1)), level_before + (sums >> _FOLD)
        slot = program * block + step * tile + jnp.arange(size, dtype=jnp.int32) * BYTES
        for i in range(BYTES):
            is_above, is_level = (above >> 8 * i) & 1, (level >> 8 * i) & 1
            rank = level_sum + ((level_rank >> 8 * i) & 0xFF) - is_level
            place = above_sum + ((above_rank >> 8 * i) & 0xFF) - is_above + jnp.minimum(rank, left)
            plt.store(slots_ref.at[place], slot + i, mask=(is_above == 1) | ((is_level == 1) & (rank < left)))
        total = jnp.sum(one, dtype=jnp.int32)
        return above_before + (total & ((1 << _FOLD) - 1)), level_before + (total >> _FOLD), ahead

    any_kept = (at(own, fine + 1) > 0) | ((at(own, fine) > 0) & (level_before < left))
    lax.fori_loop(0, any_kept.astype(jnp.int32) * (block // tile), list_tile, (above_before, level_before, ahead))


def collision(
    query,
    signs,
    counts,
    ids,
    position,
    stop,
    shares,
    *,
    first,
    capacity,
    config: Config | None = None,
    interpret=False,
):
    """See ``pallas_kernels.collision.collision``; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, slots, slices = ids.shape
    dim, most = query.shape[-1], (shares.shape[1] - 2) * slices
    config = default_config(batch * heads, slots) if config is None else config
    blocks = pl.cdiv(slots, config.block)
    table, rotated, zone, count = triton_call(
        functools.partial(_tables_kernel, rotate=signs is not None, capacity=capacity),
        grid=(batch, heads, slices),
        out_shape=(
            jax.ShapeDtypeStruct((batch, heads, slices * CLUSTERS), jnp.uint8),
            jax.ShapeDtypeStruct((batch, heads, dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads), jnp.int32),
        ),
        name="collision_tables",
        num_warps=config.tables_warps,
        interpret=interpret,
    )(query, *(() if signs is None else (signs,)), counts, shares)
    grid, rows = (batch, heads, blocks), pl.next_power_of_2(blocks)
    tile, width = min(config.block, config.tile), min(config.block // BYTES, WIDTH)
    words, reach = triton_call(
        functools.partial(_votes_kernel, first=first, part=config.part, width=width, interpret=interpret),
        grid=grid,
        in_specs=[
            pl.BlockSpec((table.size,), lambda *_: (0,)),
            _of_list(ids),
            _of_list(position),
            _whole(stop),
            _whole(zone),
        ],
        out_specs=(_of_block(config.block // BYTES), _of_block(1, LEVELS)),
        out_shape=(
            jax.ShapeDtypeStruct((batch, heads, blocks * config.block // BYTES), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, blocks, LEVELS), jnp.int32),
        ),
        name="collision_votes",
        num_warps=config.num_warps,
        interpret=interpret,
    )(table.reshape(-1), ids, position, stop, zone)
    coarse, fine = triton_call(
        functools.partial(_fine_kernel, most=most, rows=rows, width=width),
        grid=grid,
        in_specs=[_of_block(config.block // BYTES), _of_list(reach), _whole(count)],
        out_specs=(_whole(count), _of_block(1, LEVELS)),
        out_shape=(
            jax.ShapeDtypeStruct((batch, heads), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, blocks, LEVELS), jnp.int32),
        ),
        name="collision_fine",
        num_warps=4,
        interpret=interpret,
    )(words, reach, count)
    listed = triton_call(
        functools.partial(_candidates_kernel, block=config.block, tile=tile, rows=rows),
        grid=grid,
        in_specs=[_of_block(config.block // BYTES), _of_list(fine), _whole(coarse), _whole(count)],
        out_specs=pl.BlockSpec((None, None, capacity), lambda b, h, i: (b, h, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, heads, capacity), jnp.int32),
        name="collision_candidates",
        num_warps=min(max(tile // (BYTES * 32), 1), 16),  # a word a thread: no values change threads to be stored
        interpret=interpret,
    )(words, fine, coarse, count)
    return rotated, listed, count


def _whole(x):
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _of_list(x):
    return pl.BlockSpec((None, None, *x.shape[2:]), lambda b, h, i: (b, h) + (0,) * (x.ndim - 2))


def _of_block(*size):
    """The part of a program: ``size`` entries of the third axis, or one row there of ``size`` entries."""
    if len(size) == 1:
        return pl.BlockSpec((None, None, *size), lambda b, h, i: (b, h, i))
    return pl.BlockSpec((None, None, None, size[1]), lambda b, h, i: (b, h, i, 0))


def check(query, signs, counts, ids, position, stop, shares, *, first, capacity):
    """Raise ``NotImplementedError`` for what the kernels do not take."""
    batch, heads, slots, slices = ids.shape
    dim = query.shape[-1]
    if dim < 16 or dim > 256:
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from 16 to 256")
    if (shares.shape[1] - 2) * slices > MOST_VOTES:
        raise NotImplementedError(f"got up to {(shares.shape[1] - 2) * slices} votes, expected at most {MOST_VOTES}")
    size = batch * heads * slots * slices
    if 1 << 31 <= size < 1 << 32:
        raise NotImplementedError(f"got {size} bytes of ids, expected below 2 GiB or at least 4 GiB")
    if slots > MOST_BLOCKS << (_FOLD - 1):
        raise NotImplementedError(f"got {slots} slots, expected at most {MOST_BLOCKS << (_FOLD - 1)}")
    if not capacity:
        raise NotImplementedError("got no room for candidates")
