"""Collision votes as three Pallas Triton kernels: vote tables, votes of all keys, the candidates as a list.

1. Tables, one program per list and slice: 8 channels of the rotated query, the scores of the slice's 256 clusters, how many
   keys are in better ones (all pairs: no sort), and so the votes of each cluster.
2. Votes, programs over blocks of keys: every key looks its clusters up in its list's tables, which each program copies to
   shared memory (`lookup`). Beside them it counts how many keys of its block have each number of votes; the counts of all
   blocks of a list are added up.
3. Candidates, the same blocks: those counts say where the cut is, and where in the list the block's own candidates go.
   Nothing is sorted, nothing depends on which program runs first.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.kth_search import order_key
from pallas_kernels.collision import lookup
from pallas_kernels.collision.lookup import COUNTS
from pallas_kernels.collision.votes import portion
from pallas_kernels.formats.key_codes import CLUSTERS, SLICE

PROGRAMS = 528  # four per streaming multiprocessor of an H100 or H200, which holds no more of 16 warps
MOST_BLOCKS = 128  # per list: every program of the last kernel reads two counts of all blocks
BYTES = 4  # votes per word
WORDS = 4  # of a thread that lists candidates: neighbours, so that places are summed once for 16 keys
EACH_BYTE = 0x01010101
MOST_VOTES = COUNTS - 2  # a byte holds votes + 1, 0 for keys that are not asked, and the eighth bit is needed
PAIRS = 16  # rivals compared with all clusters at once
_FOLD = 16  # bits that two counts share in one word while they are summed


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
        block: keys per program, a power of two of at least 64.
        tile: keys whose place in the list a program finds at once, a power of two of at least 64.
        num_warps: warps per program that votes, at most; no more than it has keys.
    """

    block: int = 2048
    tile: int = 2048
    num_warps: int = 16

    def __post_init__(self):
        powers = all(size >= 64 and not size & (size - 1) for size in (self.block, self.tile))
        if not powers or max(self.block, self.tile) > 1 << (_FOLD - 1):
            raise ValueError(f"collision: got {self}, expected powers of two, 64 to 32768")


def default_config(lists: int, slots: int) -> Config:
    """Config for B*H ``lists`` of ``slots`` keys: enough blocks to fill the GPU, not so many that their counts weigh."""
    blocks = min(max(pl.cdiv(PROGRAMS, lists), 4), MOST_BLOCKS)
    block = pl.next_power_of_2(max(pl.cdiv(slots, blocks), 1024))
    if pl.cdiv(slots, block) > MOST_BLOCKS:
        block *= 2
    return Config(block=min(block, 1 << (_FOLD - 1)))


def _tables_kernel(*refs, rotate, capacity, interpret):
    query_ref, *signs_ref, counts_ref, shares_ref, table_ref, rotated_ref, zone_ref, count_ref, total_ref, key_ref = refs
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
    own = order_key(scores(cluster))
    key_ref[b, h, n, :] = own  # every thread needs all of them: reading is cheaper than adding up eight channels
    if not interpret:
        plt.debug_barrier()
    own, cluster = own[None, :], cluster[None, :]

    def compare(step, sums):
        rival = step * PAIRS + jnp.arange(PAIRS, dtype=jnp.int32)
        other, held = key_ref[b, h, n, rival][:, None], counts_ref[b, h, n, rival][:, None]
        better = other > own - (rival[:, None] < cluster).astype(jnp.int32)  # the lower cluster goes first among equals
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
    lanes = votes.reshape(CLUSTERS // BYTES, BYTES) << (jnp.arange(BYTES, dtype=jnp.int32)[None, :] * 8)
    words = CLUSTERS // BYTES
    table_ref[b, h, pl.ds(n * words, words)] = jnp.sum(lanes, axis=1, dtype=jnp.int32)

    @pl.when(n == 0)
    def _():
        zone_ref[b, h] = zone
        total_ref[b, h, :] = jnp.zeros((COUNTS,), jnp.int32)  # the next kernel adds to it
        count_ref[b, h] = jnp.minimum(portion(share(1), zone), capacity)


def _votes_kernel(
    table_ref, ids_ref, position_ref, stop_ref, zone_ref, _, votes_ref, reach_ref, total_ref, *, first, threads, interpret
):
    """Blocks of one list: table [N * 64] words, ids [S, N], position [S]; votes + 1 [block], reach and total [COUNTS]."""
    b, h, program = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    (slots, slices), block = ids_ref.shape, votes_ref.shape[0]
    begin, stop = program * block, jnp.minimum(stop_ref[b], slots)
    holes = zone_ref[b, h] != stop - first  # then, and only then, some slot of the zone holds nothing
    lane = jnp.arange(threads, dtype=jnp.int32)
    column = jnp.broadcast_to(jnp.arange(slices, dtype=jnp.int32)[None, :], (threads, slices))
    table = lookup.Table(table_ref, threads, interpret)

    def add(step, counted):
        slot = begin + step * threads + lane
        inside = jnp.minimum(slot, slots - 1)
        asked = (slot >= first) & (slot < stop)
        position = plt.load(position_ref.at[inside], mask=asked & holes, other=0)
        row = jnp.broadcast_to(inside[:, None], (threads, slices))
        ids = plt.load(ids_ref.at[row, column], eviction_policy="evict_first")  # read once, so not worth a cache
        votes = jnp.where(asked & (position >= 0), table.votes(ids) + 1, 0)
        votes_ref[pl.ds(step * threads, threads)] = votes.astype(jnp.uint8)
        return table.count(votes, counted)

    def nothing(step, carry):
        votes_ref[pl.ds(step * threads, threads)] = jnp.zeros((threads,), jnp.uint8)
        return carry

    steps = jnp.clip(pl.cdiv(stop - begin, threads), 0, block // threads)
    counted = lax.fori_loop(0, steps, add, table.nothing())
    lax.fori_loop(steps, block // threads, nothing, 0)
    held = table.counts(counted)
    held = jnp.where(jnp.arange(COUNTS, dtype=jnp.int32) > 0, held, 0)
    reach = jnp.sum(held, dtype=jnp.int32) - lax.cumsum(held) + held
    reach_ref[...] = reach
    jax.ref.addupdate(total_ref, (b, h, slice(None)), reach)


def _candidates_kernel(votes_ref, reach_ref, total_ref, count_ref, slots_ref, *, tile, rows, interpret):
    """The same blocks: votes + 1 [block]; reach of all blocks [blocks, COUNTS], its total [COUNTS]; slots [C] of the list."""
    b, h, program = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    block, threads = votes_ref.shape[0], tile // (WORDS * BYTES)
    lane = jnp.arange(threads, dtype=jnp.int32)

    def words(step):
        return lookup.words(votes_ref[pl.ds(step * tile, tile)].reshape(threads, WORDS * BYTES), interpret)

    ahead = words(0)  # does not wait for the cut
    number = jnp.arange(COUNTS, dtype=jnp.int32)
    wanted, total = count_ref[b, h], total_ref[b, h, :]
    # The most votes, plus one, that enough keys reach. So many reach it, and so many the next number, in all and here.
    cut = jnp.sum(((total >= wanted) & (number > 0)).astype(jnp.int32), dtype=jnp.int32)
    over, none = jnp.minimum(cut + 1, COUNTS - 1), cut + 1 >= COUNTS
    row = jnp.arange(rows, dtype=jnp.int32)
    before, row = row < program, jnp.minimum(row, reach_ref.shape[0] - 1)

    def reaching(votes, mask=True):
        return jnp.sum(jnp.where(before & mask, reach_ref[row, votes], 0), dtype=jnp.int32)

    above_before = reaching(over, ~none)
    level_before = reaching(cut) - above_before
    left = wanted - jnp.where(none, 0, total_ref[b, h, over])
    own_above = jnp.where(none, 0, reach_ref[program, over])
    own_level = reach_ref[program, cut] - own_above

    def list_tile(step, carry):
        above_before, level_before, *held = carry
        ahead = words(jnp.minimum(step + 1, block // tile - 1)) if tile < block else held
        # What lifts a byte to 128 if it is at least the cut, or more.
        above = [((x + (COUNTS - 1 - cut) * EACH_BYTE) >> 7) & EACH_BYTE for x in held]
        level = [(((x + (COUNTS - cut) * EACH_BYTE) >> 7) & EACH_BYTE) - y for x, y in zip(held, above, strict=True)]
        # Times EACH_BYTE, a byte of a word is the sum of itself and the lower ones: ranks in the word, and its total.
        above_rank, level_rank = ([x * EACH_BYTE for x in part] for part in (above, level))
        one = [((x >> 24) & 0xFF) + (((y >> 24) & 0xFF) << _FOLD) for x, y in zip(above_rank, level_rank, strict=True)]
        own = sum(one[1:], one[0])
        sums = lax.cumsum(own) - own
        slot = program * block + step * tile + lane * (WORDS * BYTES)
        for word in range(WORDS):
            above_sum = above_before + (sums & ((1 << _FOLD) - 1))
            level_sum = level_before + (sums >> _FOLD)
            for i in range(BYTES):
                is_above, is_level = (above[word] >> 8 * i) & 1, (level[word] >> 8 * i) & 1
                rank = level_sum + ((level_rank[word] >> 8 * i) & 0xFF) - is_level
                place = above_sum + ((above_rank[word] >> 8 * i) & 0xFF) - is_above + jnp.minimum(rank, left)
                keep = (is_above == 1) | ((is_level == 1) & (rank < left))
                if interpret:  # stores what is masked again, after the new value or before
                    place = jnp.where(keep, place, slots_ref.shape[0])
                plt.store(slots_ref.at[place], slot + (word * BYTES + i), mask=keep)
            sums = sums + one[word]
        if tile < block:
            total = jnp.sum(own, dtype=jnp.int32)
            above_before, level_before = above_before + (total & ((1 << _FOLD) - 1)), level_before + (total >> _FOLD)
        return above_before, level_before, *ahead

    any_kept = (own_above > 0) | ((own_level > 0) & (level_before < left))
    tiles = any_kept.astype(jnp.int32) * (block // tile)
    lax.fori_loop(0, tiles, list_tile, (above_before, level_before, *ahead))


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
    dim = query.shape[-1]
    config = default_config(batch * heads, slots) if config is None else config
    blocks = pl.cdiv(slots, config.block)
    table, rotated, zone, count, total, _ = triton_call(
        functools.partial(_tables_kernel, rotate=signs is not None, capacity=capacity, interpret=interpret),
        grid=(batch, heads, slices),
        out_shape=(
            jax.ShapeDtypeStruct((batch, heads, slices * CLUSTERS // BYTES), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, COUNTS), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, slices, CLUSTERS), jnp.int32),
        ),
        name="collision_tables",
        interpret=interpret,
    )(query, *(() if signs is None else (signs,)), counts, shares)
    grid, threads = (batch, heads, blocks), min(32 * config.num_warps, config.block)
    votes, reach, total = triton_call(
        functools.partial(_votes_kernel, first=first, threads=threads, interpret=interpret),
        grid=grid,
        in_specs=[_of_list(table), _of_list(ids), _of_list(position), _whole(stop), _whole(zone), _whole(total)],
        out_specs=(_of_block(config.block), _of_block(1, COUNTS), _whole(total)),
        out_shape=(
            jax.ShapeDtypeStruct((batch, heads, blocks * config.block), jnp.uint8),
            jax.ShapeDtypeStruct((batch, heads, blocks, COUNTS), jnp.int32),
            jax.ShapeDtypeStruct(total.shape, jnp.int32),
        ),
        input_output_aliases={5: 2},
        name="collision_votes",
        num_warps=threads // 32,
        interpret=interpret,
    )(table, ids, position, stop, zone, total)
    tile = min(config.tile, config.block)
    listed = triton_call(
        functools.partial(_candidates_kernel, tile=tile, rows=pl.next_power_of_2(blocks), interpret=interpret),
        grid=grid,
        in_specs=[_of_block(config.block), _of_list(reach), _whole(total), _whole(count)],
        out_specs=pl.BlockSpec((None, None, capacity), lambda b, h, i: (b, h, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, heads, capacity), jnp.int32),
        name="collision_candidates",
        num_warps=max(tile // (WORDS * BYTES * 32), 1),
        interpret=interpret,
    )(votes, reach, total, count)
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
    if dim < 32 or dim > 256:
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from 32 to 256")
    if (shares.shape[1] - 2) * slices > MOST_VOTES:
        raise NotImplementedError(f"got up to {(shares.shape[1] - 2) * slices} votes, expected at most {MOST_VOTES}")
    size = batch * heads * slots * slices
    if 1 << 31 <= size < 1 << 32:
        raise NotImplementedError(f"got {size} bytes of ids, expected below 2 GiB or at least 4 GiB")
    if slots > MOST_BLOCKS << (_FOLD - 1):
        raise NotImplementedError(f"got {slots} slots, expected at most {MOST_BLOCKS << (_FOLD - 1)}")
    if not capacity:
        raise NotImplementedError("got no room for candidates")
