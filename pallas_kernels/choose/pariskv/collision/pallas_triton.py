"""Collision votes as three Pallas Triton kernels: vote tables, votes of all keys, the candidates as a list.

1. Tables, one program per list and slice. It computes 8 channels of the rotated query and the scores of the slice's 256
   clusters. For each cluster it counts the keys in better clusters, by comparing pairs instead of sorting. That gives the
   votes of each cluster.
2. Votes, one program per block of keys. It copies the tables of its list to shared memory (`lookup`), and every key looks up
   its clusters there. The program also counts how many keys of its block have each number of votes; the counts of all
   blocks of a list are added up.
3. Candidates, one program per block of keys. The counts say where the cut is, and where in the list the candidates of the
   block go. Nothing is sorted, and the result does not depend on the order of programs.

Where a row's slots are divided into parts, the counts of all parts are gathered between the last two kernels.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.block_specs import of_head, whole
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_bytes
from pallas_kernels._triton.kth_search import order_key
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.choose.pariskv.collision import lookup
from pallas_kernels.choose.pariskv.collision.lookup import COUNTS
from pallas_kernels.choose.pariskv.collision.votes import portion
from pallas_kernels.formats.key_codes import CLUSTERS, SLICE

PROGRAMS = 528  # four per streaming multiprocessor of an H100 or H200, which can hold no more programs of 16 warps
MOST_BLOCKS = 128  # blocks per list: every program of the last kernel reads two counts of all blocks
BYTES = 4  # votes per word
WORDS = 4  # neighbouring words per thread that lists candidates, so that one running sum serves 16 keys
EACH_BYTE = 0x01010101
MOST_VOTES = COUNTS - 2  # a byte holds votes + 1, or 0 for keys outside of the zone; its eighth bit must stay free
SMALL = 264  # programs that make tables: up to two per multiprocessor have four warps each, more have one
RIVALS = 4  # clusters that are compared with all clusters at once
FEWER, AT_ONCE = 2, 2508  # rivals where so many programs run at once (19 a multiprocessor); with four of them 13 do
_FOLD = 16  # bits that two counts share in one word while they are summed


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        block: keys per program, a power of two of at least 64.
        tile: keys per step of a program that lists candidates, a power of two of at least 64.
        num_warps: most warps per program that votes; a program has no more threads than keys.
    """

    block: int = 2048
    tile: int = 2048
    num_warps: int = 16

    def __post_init__(self):
        powers = all(size >= 64 and not size & (size - 1) for size in (self.block, self.tile))
        if not powers or max(self.block, self.tile) > 1 << (_FOLD - 1):
            raise ValueError(f"collision: got {self}, expected powers of two, 64 to 32768")


def default_config(lists: int, slots: int) -> Config:
    """Choose a config for B*H ``lists`` of ``slots`` keys: enough blocks to fill the GPU, but few counts per list to read."""
    blocks = min(max(pl.cdiv(PROGRAMS, lists), 4), MOST_BLOCKS)
    block = pl.next_power_of_2(max(pl.cdiv(slots, blocks), 1024))
    if pl.cdiv(slots, block) > MOST_BLOCKS:
        block *= 2
    return Config(block=min(block, 1 << (_FOLD - 1)))


def _before(own, held, of, mirror, rivals, interpret):
    """Count the keys before each cluster, int32 [256]: the keys of better clusters, and of lower clusters of equal score.

    Cluster 255 - c has the negative score of cluster c. So rival 255 - r stands before cluster 255 - c exactly if r does not
    stand before c, and one comparison serves two pairs: only the rivals below 128 are compared.

    Args:
        own: order keys of the clusters' scores, int32 [256].
        held: keys in each cluster, float32 [256].
        of: gives the order keys of clusters, and the counts, float32, of these clusters and of their opposites.
        mirror: gives x float32 [256] with its entries in reverse order.
        rivals: clusters that are compared with all at once.
        interpret: compute without assembly.
    """
    cluster = jnp.arange(CLUSTERS, dtype=jnp.int32)
    half, block, shape = CLUSTERS // 2, cluster // rivals, (rivals, CLUSTERS)

    def compare(step, sums):
        other, *more = of(step * rivals + jnp.arange(rivals, dtype=jnp.int32))
        # A rival of a lower block only has to reach the score: so it has to exceed the score less 1.
        least = jnp.broadcast_to((own - (block > step).astype(jnp.int32))[None, :], shape)
        other, *more = (jnp.broadcast_to(x[:, None], shape) for x in (other, *more))
        return tuple(lookup.add_where_greater(x, other, least, y, interpret) for x, y in zip(sums, more, strict=True))

    # Threads keep sums of their own until the end: a sum over rivals in every step would cost more than the comparisons.
    # Counts below 2**24 are exact in float32, whose additions do not wait for the unit that compares.
    sums = lax.fori_loop(0, half // rivals, compare, (jnp.zeros(shape, jnp.float32),) * 2)
    before, opposite = (jnp.sum(x, axis=0) for x in sums)
    for i in range(rivals - 1):  # rivals of the cluster's own block that are lower and have its score
        rival = block * rivals + i
        other, *more = of(rival)
        tie = (rival < jnp.minimum(cluster, half)) & (other == own)
        before, opposite = (x + jnp.where(tie, y, 0.0) for x, y in zip((before, opposite), more, strict=True))
    # Of the rivals from 128 on, those stand before a cluster whose opposites do not stand before its opposite; the cluster
    # itself does not.
    upper = jnp.where(cluster >= half, held, 0.0)
    return (before + (jnp.sum(upper) - upper - mirror(opposite))).astype(jnp.int32)


def _tables_kernel(*refs, rotate, capacity, rivals, interpret):
    query_ref, *signs_ref, counts_ref, shares_ref, table_ref, rotated_ref, zone_ref, count_ref, total_ref, key_ref = refs
    b, h, n = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    group, dim = query_ref.shape[2:]
    # Every load is issued before the program waits for any of them.
    held = counts_ref[b, h, n, :]
    query = [query_ref[b, h, g, :] for g in range(group)]
    signs = [x[:] for x in signs_ref]
    pieces, columns = shares_ref.shape
    shares = [[shares_ref[i, column] for i in range(pieces)] for column in range(columns)]
    query = sum(x.astype(jnp.float32) for x in query) / group
    if rotate:
        query = query * signs[0]
    row, channel = jnp.arange(SLICE, dtype=jnp.int32), jnp.arange(dim, dtype=jnp.int32)[None, :]
    at = n * SLICE + row[:, None]  # this slice's channels
    # Entry (i, j) of the Hadamard matrix is -1 if an odd number of bits is set in both i and j. Without a rotation the matrix
    # is the identity.
    if rotate:
        odd = (lax.population_count(channel & at) & 1) == 1
        parts = jnp.where(odd, -query[None, :], query[None, :])
    else:
        parts = jnp.where(channel == at, query[None, :], 0.0)
    rotated = jnp.sum(parts, axis=1)
    rotated_ref[b, h, pl.ds(n * SLICE, SLICE)] = rotated

    rotated = [jnp.sum(jnp.where(row == j, rotated, 0.0)) for j in range(SLICE)]  # as scalars

    def scores(cluster):  # product of the slice with the sign vector of each cluster
        total = jnp.zeros(cluster.shape, jnp.float32)
        for j, y in enumerate(rotated):
            total = total + jnp.where(((cluster >> j) & 1) == 1, y, -y)
        return total

    cluster = jnp.arange(CLUSTERS, dtype=jnp.int32)
    own = order_key(scores(cluster))
    # Every thread needs the scores of all clusters. To read them back is cheaper than to add up eight channels again.
    key_ref[b, h, n, 0, :] = own
    key_ref[b, h, n, 1, :] = lax.bitcast_convert_type(held.astype(jnp.float32), jnp.int32)
    if not interpret:
        plt.debug_barrier()  # until all threads have written their scores

    def of(at):
        counts = (key_ref[b, h, n, 1, i] for i in (at, CLUSTERS - 1 - at))
        return key_ref[b, h, n, 0, at], *(lax.bitcast_convert_type(x, jnp.float32) for x in counts)

    def mirror(x):
        key_ref[b, h, n, 2, :] = lax.bitcast_convert_type(x, jnp.int32)
        if not interpret:
            plt.debug_barrier()  # until all threads have written
        return lax.bitcast_convert_type(key_ref[b, h, n, 2, CLUSTERS - 1 - cluster], jnp.float32)

    before = _before(own, held.astype(jnp.float32), of, mirror, rivals, interpret)
    zone = jnp.sum(held, dtype=jnp.int32)  # keys of the zone; all slices have the same sum

    def share(column):  # of the range of zone lengths that this zone falls into
        chosen = shares[column][0]
        for i in range(1, pieces):
            chosen = jnp.where(zone >= shares[0][i - 1], shares[column][i], chosen)
        return chosen

    # A cluster begins in a tier if fewer keys stand before it than the tier covers. Four votes make a word of the table.
    votes = jnp.zeros((CLUSTERS,), jnp.int32)
    for column in range(2, columns):
        votes = votes + (before < portion(share(column), zone)).astype(jnp.int32)
    lanes = votes.reshape(CLUSTERS // BYTES, BYTES) << (jnp.arange(BYTES, dtype=jnp.int32)[None, :] * 8)
    words = CLUSTERS // BYTES
    table_ref[b, h, pl.ds(n * words, words)] = jnp.sum(lanes, axis=1, dtype=jnp.int32)

    @pl.when(n == 0)  # one program per list writes what all slices share
    def _():
        zone_ref[b, h] = zone
        total_ref[b, h, :] = jnp.zeros((COUNTS,), jnp.int32)  # the next kernel adds to it
        count_ref[b, h] = jnp.minimum(portion(share(1), zone), capacity)


def _votes_kernel(table_ref, ids_ref, position_ref, stop_ref, zone_ref, *refs, first, threads, interpret):
    # Of one list: table [N * 64] words, ids [S, N], position [S]; the first slot of the zone [], if it is not known before.
    # Results of this block: votes + 1 [block]; reach [COUNTS], how many of its keys have each number of votes + 1 or more.
    # Result of all blocks: total [B, H, COUNTS], the sums of reach.
    *first_ref, _, votes_ref, reach_ref, total_ref = refs
    b, h, program = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    (slots, slices), block = ids_ref.shape, votes_ref.shape[0]
    begin, stop = program * block, jnp.minimum(stop_ref[b], slots)
    if first_ref:  # of a part, the number of its keys is not known
        first, holes = first_ref[0][0], jnp.bool_(True)
    else:
        holes = zone_ref[b, h] != stop - first  # true exactly if some slot of the zone is empty: only then positions are read
    lane = jnp.arange(threads, dtype=jnp.int32)
    column = jnp.broadcast_to(jnp.arange(slices, dtype=jnp.int32)[None, :], (threads, slices))
    table = lookup.Table(table_ref, threads, interpret)

    def add(step, counted):
        slot = begin + step * threads + lane
        inside = jnp.minimum(slot, slots - 1)
        asked = (slot >= first) & (slot < stop)
        position = plt.load(position_ref.at[inside], mask=asked & holes, other=0)
        row = jnp.broadcast_to(inside[:, None], (threads, slices))
        ids = plt.load(ids_ref.at[row, column], eviction_policy="evict_first")  # they are read only once
        votes = jnp.where(asked & (position >= 0), table.votes(ids) + 1, 0)
        votes_ref[pl.ds(step * threads, threads)] = votes.astype(jnp.uint8)
        return table.count(votes, counted)

    def nothing(step, carry):  # behind the zone
        votes_ref[pl.ds(step * threads, threads)] = jnp.zeros((threads,), jnp.uint8)
        return carry

    steps = jnp.clip(pl.cdiv(stop - begin, threads), 0, block // threads)
    counted = lax.fori_loop(0, steps, add, table.nothing())
    lax.fori_loop(steps, block // threads, nothing, 0)
    held = table.counts(counted)
    held = jnp.where(jnp.arange(COUNTS, dtype=jnp.int32) > 0, held, 0)  # 0 stands for keys outside of the zone
    reach = jnp.sum(held, dtype=jnp.int32) - lax.cumsum(held) + held
    reach_ref[...] = reach
    # An atomic sum of whole numbers, which does not depend on the order of programs.
    jax.ref.addupdate(total_ref, (b, h, slice(None)), reach)


def _candidates_kernel(votes_ref, reach_ref, total_ref, count_ref, *refs, tile, rows, interpret):
    # Of this block: votes + 1 [block]. Of one list: reach [blocks, COUNTS] and slots [C]. Of all lists: total [B, H, COUNTS]
    # and count [B, H]; of a part how many keys at the cut are candidates, left [B, H].
    *left_ref, slots_ref = refs
    b, h, program = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    block, threads = votes_ref.shape[0], tile // (WORDS * BYTES)
    lane = jnp.arange(threads, dtype=jnp.int32)

    def words(step):
        return lookup.words(votes_ref[pl.ds(step * tile, tile)].reshape(threads, WORDS * BYTES), interpret)

    ahead = words(0)  # loaded before the cut is known
    number = jnp.arange(COUNTS, dtype=jnp.int32)
    wanted, total = count_ref[b, h], total_ref[b, h, :]
    # The cut is the highest number of votes + 1 that enough keys reach. All keys above it are candidates, and of the keys at
    # it the lower slots. `over` is the next number; there is none behind the last.
    cut = jnp.sum(((total >= wanted) & (number > 0)).astype(jnp.int32), dtype=jnp.int32)
    over, none = jnp.minimum(cut + 1, COUNTS - 1), cut + 1 >= COUNTS
    row = jnp.arange(rows, dtype=jnp.int32)
    before, row = row < program, jnp.minimum(row, reach_ref.shape[0] - 1)

    def reaching(votes, mask=True):  # keys of the blocks before this one that have so many votes + 1 or more
        return jnp.sum(jnp.where(before & mask, reach_ref[row, votes], 0), dtype=jnp.int32)

    above_before = reaching(over, ~none)
    level_before = reaching(cut) - above_before
    left = left_ref[0][b, h] if left_ref else wanted - jnp.where(none, 0, total_ref[b, h, over])
    own_above = jnp.where(none, 0, reach_ref[program, over])
    own_level = reach_ref[program, cut] - own_above

    def list_tile(step, carry):
        above_before, level_before, *held = carry
        ahead = words(jnp.minimum(step + 1, block // tile - 1)) if tile < block else held
        # In four bytes at once: adding 127 - cut sets the eighth bit of bytes above the cut, and 128 - cut sets it in
        # bytes at the cut or above.
        above = [((x + (COUNTS - 1 - cut) * EACH_BYTE) >> 7) & EACH_BYTE for x in held]
        level = [(((x + (COUNTS - cut) * EACH_BYTE) >> 7) & EACH_BYTE) - y for x, y in zip(held, above, strict=True)]
        # Times EACH_BYTE, each byte of a word becomes the sum of itself and the lower bytes: these are ranks within the word,
        # and the highest byte is the word's total. Both totals share one number, for one running sum over threads.
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
                # The rank among keys at the cut; only the first `left` of them are candidates. A candidate goes behind all
                # candidates of lower slots.
                rank = level_sum + ((level_rank[word] >> 8 * i) & 0xFF) - is_level
                place = above_sum + ((above_rank[word] >> 8 * i) & 0xFF) - is_above + jnp.minimum(rank, left)
                keep = (is_above == 1) | ((is_level == 1) & (rank < left))
                if interpret:  # the interpreter would write masked entries back, maybe after the new value of another key
                    place = jnp.where(keep, place, slots_ref.shape[0])
                plt.store(slots_ref.at[place], slot + (word * BYTES + i), mask=keep)
            sums = sums + one[word]
        if tile < block:
            total = jnp.sum(own, dtype=jnp.int32)
            above_before, level_before = above_before + (total & ((1 << _FOLD) - 1)), level_before + (total >> _FOLD)
        return above_before, level_before, *ahead

    # A block without a candidate lists nothing.
    any_kept = (own_above > 0) | ((own_level > 0) & (level_before < left))
    tiles = any_kept.astype(jnp.int32) * (block // tile)
    lax.fori_loop(0, tiles, list_tile, (above_before, level_before, *ahead))


def collision(
    query, signs, counts, ids, position, stop, shares, *, first, capacity, part=None, config: Config | None = None,
    interpret=False,
):  # fmt: skip
    """List the keys of the zone with the most votes; ``interpret=True`` runs anywhere, slowly."""
    (batch, heads, slots, slices), begins = ids.shape, []
    if part is not None:
        first, stop = part.zone(first, stop, slots)
        begins, first = [first[None]], None
    dim = query.shape[-1]
    config = default_config(batch * heads, slots) if config is None else config
    if not interpret and min(config.block, config.tile) < 128:  # with 64 keys an H100 gave wrong lists
        raise ValueError(f"collision: got {config}, expected a block and a tile of at least 128 keys on a GPU")
    blocks = pl.cdiv(slots, config.block)
    tables = batch * heads * slices
    warps, rivals = 4 if tables <= SMALL else 1, FEWER if SMALL < tables <= AT_ONCE else RIVALS
    table, rotated, zone, count, total, _ = triton_call(
        functools.partial(_tables_kernel, rotate=signs is not None, capacity=capacity, rivals=rivals, interpret=interpret),
        grid=(batch, heads, slices),
        out_shape=(
            jax.ShapeDtypeStruct((batch, heads, slices * CLUSTERS // BYTES), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, COUNTS), jnp.int32),
            jax.ShapeDtypeStruct((batch, heads, slices, 3, CLUSTERS), jnp.int32),
        ),
        name="collision_tables",
        num_warps=warps,
        interpret=interpret,
    )(query, *(() if signs is None else (signs,)), counts, shares)
    grid, threads = (batch, heads, blocks), min(32 * config.num_warps, config.block)
    votes, reach, total = triton_call(
        functools.partial(_votes_kernel, first=first, threads=threads, interpret=interpret),
        grid=grid,
        in_specs=[*map(of_head, (table, ids, position)), *map(whole, (stop, zone, *begins, total))],
        out_specs=(_of_block(config.block), _of_block(1, COUNTS), whole(total)),
        out_shape=(
            jax.ShapeDtypeStruct((batch, heads, blocks * config.block), jnp.uint8),
            jax.ShapeDtypeStruct((batch, heads, blocks, COUNTS), jnp.int32),
            jax.ShapeDtypeStruct(total.shape, jnp.int32),
        ),
        input_output_aliases={5 + len(begins): 2},
        name="collision_votes",
        num_warps=threads // 32,
        interpret=interpret,
    )(table, ids, position, stop, zone, *begins, total)
    lefts, room = [], capacity
    if part is not None:
        total, _, left, here = part.share_out(total, count)
        lefts, room = [left], min(capacity, slots)
    tile = min(config.tile, config.block)
    listed = triton_call(
        functools.partial(_candidates_kernel, tile=tile, rows=pl.next_power_of_2(blocks), interpret=interpret),
        grid=grid,
        in_specs=[_of_block(config.block), of_head(reach), *map(whole, (total, count, *lefts))],
        out_specs=pl.BlockSpec((None, None, room), lambda b, h, i: (b, h, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, heads, room), jnp.int32),
        name="collision_candidates",
        num_warps=max(tile // (WORDS * BYTES * 32), 1),
        interpret=interpret,
    )(votes, reach, total, count, *lefts)
    return rotated, listed, count if part is None else here


def _of_block(*size):
    """Show program (b, h, i) its block of the third axis: ``size`` entries, or with two sizes its row of ``size[1]``."""
    if len(size) == 1:
        return pl.BlockSpec((None, None, *size), lambda b, h, i: (b, h, i))
    return pl.BlockSpec((None, None, None, size[1]), lambda b, h, i: (b, h, i, 0))


def check(query, signs, counts, ids, position, stop, shares, *, first, capacity, part=None):
    """Raise ``NotImplementedError`` for sizes that the kernels do not take."""
    slots, slices = ids.shape[2:]
    dim = query.shape[-1]
    if dim < 32 or dim > 256:
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from 32 to 256")
    if (shares.shape[1] - 2) * slices > MOST_VOTES:
        raise NotImplementedError(f"got up to {(shares.shape[1] - 2) * slices} votes, expected at most {MOST_VOTES}")
    check_bytes(ids)
    if slots > MOST_BLOCKS << (_FOLD - 1):
        raise NotImplementedError(f"got {slots} slots, expected at most {MOST_BLOCKS << (_FOLD - 1)}")
    if not capacity:
        raise NotImplementedError("got no room for candidates")
