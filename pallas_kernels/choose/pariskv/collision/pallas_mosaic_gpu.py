"""Collision votes through Mosaic GPU: a kernel for the tables of votes, and one for the votes and their best keys.

A list's keys lie in the registers of a cluster of up to 8 programs, as in `kth_select`. Each has the tables in shared memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.key_codes import DIMS, rotated
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._mosaic_gpu.search import MOST, places
from pallas_kernels._triton.kth_search import ALL, NEVER, hits_of, pair_of
from pallas_kernels.choose.pariskv.collision.votes import portion
from pallas_kernels.formats.key_codes import CLUSTERS, SLICE

ALONE = 2**11  # keys for which one program is enough
PARTS = (1, 2, 4, 8)  # programs of a cluster
TOGETHER = 8  # keys whose ids a thread loads together
BYTES = 4  # of a word
TAKES = f"{arrays.HOPPER}, D of 32, 64 or 128, whole rows and lists of up to {PARTS[-1] * MOST} slots"


def _body_tables(query_ref, counts_ref, shares_ref, *refs, rotate, group, dim, slices, pieces, tiers, capacity):
    # query [L, G, D]; counts [L * N, 256]; shares [P, 2 + Z]; signs [D] if rotated; rotated [L, D]; table [L * N, 64];
    # count [L]. In shared memory: the query, and the scores and counts of the slice's clusters.
    *signs_ref, rotated_ref, table_ref, count_ref, numbers, scores, counted = refs
    line, part = lax.axis_index("x"), lax.axis_index("y")
    channel, thread = arrays.counted(t.THREADS), arrays.counted(CLUSTERS) & (t.THREADS - 1)
    inside = channel < dim
    heads = [arrays.load(query_ref, jnp.where(inside, (line * group + g) * dim + channel, -1)) for g in range(group)]
    query = functools.reduce(jnp.add, heads) / group
    query = rotated(query, signs_ref[0], dim, numbers) if rotate else query
    arrays.store(rotated_ref, jnp.where(inside & (part < 1), line * dim + channel, -1), query)
    arrays.store_shared(numbers, channel, query)
    arrays.meet()
    cluster = arrays.counted(CLUSTERS)
    score = arrays.spread(0.0, CLUSTERS, jnp.float32)
    for i in range(SLICE):  # in the order of `votes.cluster_scores`
        y = arrays.load_shared(numbers, arrays.spread(part * SLICE + i, CLUSTERS))
        score = score + jnp.where((cluster >> i) & 1 > 0, y, -y)
    count = arrays.load(counts_ref, (line * slices + part) * CLUSTERS + cluster)
    zone = jnp.sum(arrays.load(counts_ref, line * slices * CLUSTERS + cluster))
    width = 2 + tiers
    first = [arrays.scalar(shares_ref, line * 0 + i * width) for i in range(pieces - 1)]
    piece = sum(((zone >= x).astype(jnp.int32) for x in first), jnp.int32(0)) * width
    cutoffs = [portion(arrays.scalar(shares_ref, piece + 2 + i), zone) for i in range(tiers)]
    candidates = jnp.minimum(portion(arrays.scalar(shares_ref, piece + 1), zone), capacity)
    arrays.put(count_ref, jnp.where(part < 1, line, -1), candidates)
    arrays.store_shared(scores, cluster, score)
    arrays.store_shared(counted, cluster, count)
    arrays.meet()

    def add(step, before):
        for i in range(TOGETHER):
            at = step * TOGETHER + i
            other, more = (arrays.load_shared(x, arrays.spread(at, CLUSTERS)) for x in (scores, counted))
            better = (other > score) | ((other == score) & (cluster > at))  # of equal scores the lower cluster is first
            before = before + jnp.where(better, more, 0)
        return before

    before = lax.fori_loop(0, CLUSTERS // TOGETHER, add, arrays.spread(0, CLUSTERS))
    word = sum((before < x).astype(jnp.int32) for x in cutoffs) << (8 * (thread & (BYTES - 1)))
    for distance in (1, 2):
        word = word + arrays.exchanged(word, distance, None)
    at = (line * slices + part) * (CLUSTERS // BYTES) + lax.div(cluster, BYTES)
    arrays.store(table_ref, jnp.where((thread & (BYTES - 1)) < 1, at, -1), word)


def _cut(votes, wanted, most, parts, peers):
    """Find what `search.threshold_of` finds, of votes int32 [N] in 0..``most``, or below."""

    def count(left, right):
        found = arrays.of_parts(list(pair_of(hits_of(votes, left, right))), peers, parts)
        return [functools.reduce(jnp.add, column) for column in zip(*found, strict=True)]

    def unsettled(state):
        low, high, reach, _ = state
        return (reach > wanted) & (high > low + 1)

    def narrow(state):  # to a third
        low, high, reach, over = state
        third = jnp.maximum(lax.div(high - low, 3), 1)
        left, right = low + third, jnp.minimum(low + 2 * third, high - 1)
        some, fewer = count(left, right)
        enough, more = some >= wanted, fewer >= wanted
        low, reach = (jnp.where(more, x, jnp.where(enough, y, z)) for x, y, z in ((right, left, low), (fewer, some, reach)))
        high, over = (jnp.where(more, z, jnp.where(enough, x, y)) for x, y, z in ((right, left, high), (fewer, some, over)))
        return low, high, reach, over

    held, none = count(jnp.int32(0), jnp.int32(most + 1))
    low, _, reach, over = lax.while_loop(unsettled, narrow, (jnp.int32(0), jnp.int32(most + 1), held, none))
    return low, jnp.where(reach > wanted, wanted - over, ALL), jnp.minimum(held, wanted)


def _load_ids(ids_ref, row, slices):
    """Load the ids of keys ``row`` int32 [N], as words: a list of int32 [N]."""
    ref, own, count = plgpu.RefType(), t.own(row.shape[0] // t.THREADS), slices // BYTES
    one = plgpu.ShapeDtypeStruct(row.shape, jnp.int32, layout=own)

    @plgpu.inline_mgpu(arg_types=(ref, own), return_type=(one,) * count)
    def run(ctx, ids, row):
        base, found = t.address(ids), []
        for x in t.numbers_of(row):
            place = t.at(base, t.element(x, slices, t.number(0)), 1)
            found.append([x for i in range(0, count, BYTES) for x in t.load_words(place, 4 * i, min(BYTES, count - i))])
        return tuple(t.made_of(list(x)) for x in zip(*found, strict=True))

    return run(ids_ref, row)


def _add_votes(table, words, shared, at):
    """Sum up the votes of keys, whose ids are ``words``, in ``table``, and write them to ``shared`` at int32 [N]."""
    ref, own = plgpu.RefType(), t.own(at.shape[0] // t.THREADS)

    @plgpu.inline_mgpu(arg_types=(ref, (own,) * len(words), ref, own))
    def run(ctx, table, words, shared, at):
        base, to = (t.number(t.address(x)) for x in (table, shared))
        for place, *mine in zip(t.numbers_of(at), *map(t.numbers_of, words), strict=True):
            votes = t.number(0)
            for i in range(len(mine) * BYTES):
                id_ = (mine[i // BYTES] >> (8 * (i % BYTES))) & (CLUSTERS - 1)
                votes = votes + t.number(t.ptx("ld.shared.u8 $0, [$1];", base + id_ + i * CLUSTERS, result=t.i32()))
            t.ptx("st.shared.b32 [$0], $1;", to + place * 4, votes)

    run(table, tuple(words), shared, at)


def _body(
    table_ref, ids_ref, position_ref, stop_ref, count_ref, list_ref, table, votes, words, peers, *, heads, slots, slices,
    capacity, first, size, parts, most,
):  # fmt: skip
    # table [L, N * 64]; ids [L * S, N]; position [L, S]; stop [B]; count [L]; list [L, C]. In shared memory: the table, the
    # votes of this program's keys, and what the search takes.
    line, part = lax.axis_index("x"), lax.axis_index("part") if parts > 1 else jnp.int32(0)
    stop, wanted = arrays.scalar(stop_ref, lax.div(line, heads)), arrays.scalar(count_ref, line)
    width = slices * CLUSTERS // BYTES
    arrays.begin_parts(peers, parts)
    table[...] = arrays.load(table_ref, line * width + arrays.counted(width))
    arrays.meet()
    entry = arrays.counted(t.THREADS * TOGETHER)

    def place_of(entry):  # of its votes in shared memory: neither neighbours nor threads meet in a bank
        turn = lax.rem(entry, size // t.THREADS)
        return turn * t.THREADS + ((lax.div(entry, size // t.THREADS) + turn) & (t.THREADS - 1))

    def load(step):
        slot = jnp.minimum(part * size + step * entry.shape[0] + entry, slots - 1)
        return tuple(_load_ids(ids_ref, line * slots + slot, slices))

    def add(step, ids):
        ahead = load(step + 1)
        _add_votes(table, ids, votes, place_of(step * entry.shape[0] + entry))
        return ahead

    lax.fori_loop(0, size // entry.shape[0], add, load(jnp.int32(0)))
    arrays.meet()
    key_of = arrays.in_order(size)
    slot = part * size + key_of
    inside = (slot >= first) & (slot < jnp.minimum(stop, slots))
    position = arrays.load_run(position_ref, line, part * size, size, -1)
    key = jnp.where(inside & (position >= 0), arrays.load_shared(votes, place_of(key_of)), NEVER)
    threshold, ties, chosen = _cut(key, wanted, most, parts, peers)
    keep, place = places(key, threshold, ties, part, parts, words, peers)
    listed = keep & (place < jnp.minimum(chosen, capacity))
    arrays.store(list_ref, jnp.where(listed, line * capacity + place, -1), slot)


def collision(query, signs, counts, ids, position, stop, shares, *, first, capacity, part=None):
    """List the keys of the zone with the most votes."""
    batch, heads, slots, slices = ids.shape
    (group, dim), lists, unit, tiers = query.shape[2:], batch * heads, t.THREADS * TOGETHER, shares.shape[1] - 2
    flat = query.reshape(lists, group, dim), counts.reshape(lists * slices, CLUSTERS), shares
    shapes = ((lists, dim), jnp.float32), ((lists, slices * CLUSTERS // BYTES), jnp.int32), ((lists,), jnp.int32)
    scratch = ((t.THREADS,), jnp.float32), ((CLUSTERS,), jnp.float32), ((CLUSTERS,), jnp.int32)
    tables_of = functools.partial(
        _body_tables, rotate=signs is not None, group=group, dim=dim, slices=slices, pieces=shares.shape[0], tiers=tiers,
        capacity=capacity,
    )  # fmt: skip
    query, tables, count = arrays.program(
        tables_of, [jax.ShapeDtypeStruct(*x) for x in shapes], grid=(lists, slices), scratch=[plgpu.SMEM(*x) for x in scratch]
    )(*flat, *(() if signs is None else (signs,)))
    parts = next((n for n in PARTS if slots <= n * ALONE), PARTS[-1])
    size = -(-slots // (parts * unit)) * unit
    scratch = [(tables.shape[1],), (size,), (4,), (arrays.PEERS,)]
    (listed,) = arrays.program(
        functools.partial(
            _body,
            heads=heads,
            slots=slots,
            slices=slices,
            capacity=capacity,
            first=first,
            size=size,
            parts=parts,
            most=tiers * slices,
        ),
        [jax.ShapeDtypeStruct((lists, capacity), jnp.int32)],
        grid=(lists,),
        parts=parts,
        scratch=[plgpu.SMEM(x, jnp.int32) for x in scratch],
    )(tables, ids.reshape(lists * slots, slices), position.reshape(lists, slots), stop, count)
    return query.reshape(batch, heads, dim), listed.reshape(batch, heads, capacity), count.reshape(batch, heads)


def check(query, signs, counts, ids, position, stop, shares, *, first, capacity, part=None):
    """Raise ``NotImplementedError`` for other GPUs, parts of a row, and sizes that the kernel does not take."""
    arrays.check_hopper()
    batch, heads, slots, slices = ids.shape
    arrays.check_floats(query)
    if part is not None or slices % BYTES or query.shape[3] not in DIMS:
        raise NotImplementedError(
            f"got a part of each row, or {slices} slices, expected whole rows and {BYTES} to {DIMS[-1] // SLICE} slices"
        )
    most = PARTS[-1] * MOST
    if not 1 <= slots <= most or not 1 <= capacity <= most or batch * heads * slots >= 2**31:
        raise NotImplementedError(f"got {slots} slots and room for {capacity}, expected 1 to {most}")
