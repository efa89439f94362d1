"""Collision votes through Mosaic GPU: a cluster of programs shares the keys of a list.

1. The programs of a list share its slices. A warp sorts the clusters of one: 128 of them, because those of opposite signs
   have opposite scores. Keys in better clusters give the votes.
2. A vote has four bits, so the votes of the clusters c and c + 128 share a byte, and a slice's table has one word in each
   bank of shared memory: no look-up waits for another one. A key takes the byte and chooses its half by the id's highest bit.
3. The votes stay in shared memory, a byte each, where they are counted too; four are compared with the cut at once. The
   counts of all programs say where the cut is, and where in the list the candidates of each program go.
"""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays, assembly, bins
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.key_codes import rotated
from pallas_kernels._mosaic_gpu.pallas import pl
from pallas_kernels.choose.pariskv.collision.votes import portion
from pallas_kernels.formats.key_codes import CLUSTERS, SLICE

BYTES = 4  # of a word
HALF = CLUSTERS // 2
TOGETHER = 4  # keys of a thread whose ids are on their way together
AHEAD = 3  # steps for whose ids the level-2 cache is asked
MOST_VOTES = 7  # of a cluster
EACH = HALF // 32  # pairs of opposite clusters of a lane
ROOM = CLUSTERS + HALF // BYTES  # words of a warp that makes a table: keys of the clusters, votes
MOST_KEYS = 3 * 2**14  # of a program, which counts in halves of words and has their votes in shared memory
EACH_BYTE = 0x01010101


def _first_counts(counts_ref, line):
    """Load the first slice's counts of a line [L, N * 256]: eight of each lane, int32 [128] each."""
    names = [f"${i}" for i in range(8)]
    lines = [".reg .b64 at, to; .reg .b32 lane; mov.u32 lane, %laneid; mul.wide.u32 to, lane, 32;"]
    lines.append(f"mad.wide.s32 at, $9, {4 * counts_ref.shape[1]}, $8; add.s64 at, at, to;")
    lines += [f"ld.global.nc.v4.b32 {{{', '.join(names[i : i + 4])}}}, [at + {4 * i}];" for i in (0, 4)]
    return assembly.run(lines, [counts_ref], [line], [jnp.int32] * 8)


def _sort(keys, orders):
    """Sort 128 pairs of int32 without signs, four of each lane, largest first: the second ones of all, in the same form.

    First 32 bits of each pair are sorted: 24 of how far its key is below the largest, and the second one, which is below 256.
    Where two have the same 24, the warp sorts 64 bits.
    """
    each = range(EACH)
    lines = [".reg .pred p, upper; .reg .b64 t, a<4>, b<4>; .reg .b32 lane, x, y, v<4>, w<4>; mov.u32 lane, %laneid;"]
    lines.append(f"mov.b32 x, ${EACH};")
    lines += [f"max.u32 x, x, ${EACH + k};" for k in each[1:]]
    lines.append("redux.sync.max.u32 x, x, -1;")
    for k in each:  # 16 powers of two below the largest are told apart
        lines.append(f"sub.u32 y, x, ${EACH + k}; min.u32 y, y, 0x7ffffff; xor.b32 y, y, 0x7ffffff; shl.b32 y, y, 5;")
        lines.append(f"and.b32 y, y, -256; or.b32 w{k}, y, ${2 * EACH + k};")
    lines += _sorted_words()
    lines.append("shfl.sync.down.b32 y, w0, 1, 31, -1; mov.b32 x, 0;")
    for one, two in (("w0", "w1"), ("w1", "w2"), ("w2", "w3"), ("w3", "y")):
        lines.append(f"xor.b32 v0, {one}, {two}; setp.lt.u32 p, v0, 256; @p add.s32 x, x, 1;")
    lines.append("redux.sync.add.s32 x, x, -1; setp.eq.s32 p, x, 0; @p bra SORTED;")
    lines += [f"mov.b64 a{k}, {{${2 * EACH + k}, ${EACH + k}}};" for k in each]
    for far, near in _distances():
        if not far:
            for k in (k for k in each if k < k ^ near):
                one, two = f"a{k}", f"a{k ^ near}"
                lines.append(f"setp.lt.u64 p, {one}, {two}; selp.b64 t, {two}, {one}, p;")
                lines.append(f"selp.b64 {two}, {one}, {two}, p; mov.b64 {one}, t;")
            continue
        for k in each:
            lines.append(f"mov.b64 {{x, y}}, a{k ^ near}; shfl.sync.bfly.b32 x, x, {far}, 31, -1;")
            lines.append(f"shfl.sync.bfly.b32 y, y, {far}, 31, -1; mov.b64 b{k}, {{x, y}};")
        lines.append(f"and.b32 x, lane, {1 << (far.bit_length() - 1)}; setp.ne.s32 upper, x, 0;")
        lines += [f"setp.gt.xor.u64 p, a{k}, b{k}, upper; selp.b64 a{k}, a{k}, b{k}, p;" for k in each]
    lines += [f"mov.b64 {{w{k}, y}}, a{k};" for k in each]
    lines += [f"{'SORTED: ' * (k == 0)}and.b32 ${k}, w{k}, 255;" for k in each]
    return assembly.run(lines, (), [*keys, *orders], [jnp.int32] * EACH)


def _distances():
    """Yield the distances of a sort, in lanes and in a lane: runs are merged with their mirror places, then halved."""
    for bits in range(1, 8):
        for distance in (2**bits - 1, *(2**i for i in reversed(range(bits - 1)))):
            yield divmod(distance, EACH)


def _sorted_words():
    """Write PTX that sorts 128 words, ``w0`` and so on of each lane, largest first."""
    lines = []
    for far, near in _distances():
        if not far:
            for k in (k for k in range(EACH) if k < k ^ near):
                one, two = f"w{k}", f"w{k ^ near}"
                lines.append(f"mov.b32 x, {one}; max.u32 {one}, x, {two}; min.u32 {two}, x, {two};")
            continue
        lines += [f"shfl.sync.bfly.b32 v{k}, w{k ^ near}, {far}, 31, -1;" for k in range(EACH)]
        lines.append(f"and.b32 x, lane, {1 << (far.bit_length() - 1)}; setp.ne.s32 upper, x, 0;")
        lines += [f"@upper min.u32 w{k}, w{k}, v{k}; @!upper max.u32 w{k}, w{k}, v{k};" for k in range(EACH)]
    return lines


def _upto(x):
    """Sum up int32 [128] of this lane and the lanes before it."""
    lines = [".reg .pred p; .reg .b32 lane, y; mov.u32 lane, %laneid; mov.b32 $0, $1;"]
    for step in (1, 2, 4, 8, 16):
        lines.append(f"shfl.sync.up.b32 y, $0, {step}, 0, -1; setp.ge.s32 p, lane, {step}; @p add.s32 $0, $0, y;")
    return assembly.run(lines, (), [x], [jnp.int32])[0]


# A byte of ids can be the lowest byte of an address then.
_ALIGN = "add.s32 table, table, 255; and.b32 table, table, -256;"


def _write(table, at, word):
    """Write int32 [128] to the tables, at int32 [128] unless that is negative."""
    lines = [f".reg .pred p; .reg .b32 table; mov.b32 table, $0; {_ALIGN} mad.lo.s32 table, $1, 4, table;"]
    assembly.run([*lines, "setp.ge.s32 p, $1, 0; @p st.shared.b32 [table], $2;"], [table], [at, word])


def _gather(table, mine, slices, n):
    """Copy the tables of the other programs of the cluster, each of which has ``mine`` slices; wait for them before."""
    lines = [".reg .pred p; .reg .b32 table, at, i, x; mov.u32 i, %tid.x; mov.b32 table, $0;", _ALIGN]
    lines.append(f"COPY: setp.ge.s32 p, i, {slices * HALF // BYTES}; @p bra DONE; div.u32 x, i, {mine * HALF // BYTES};")
    lines.append("setp.ne.s32 p, x, $1; mad.lo.s32 at, i, 4, table; mapa.shared::cluster.u32 x, at, x;")
    lines.append(f"@p ld.shared::cluster.b32 x, [x]; @p st.shared.b32 [at], x; add.s32 i, i, {n.threads}; bra COPY;")
    assembly.run([*lines, "DONE: barrier.sync 0;"], [table], [n.part()])


def _tables(n, refs, line, zone, cutoffs):
    """Make the tables, a warp for each slice; the programs of a cluster share the slices out."""
    (counts_ref, numbers, weights, table), part, team = refs, n.part(), n.group()
    thread, slices = arrays.counted(t.THREADS), counts_ref.shape[1] // CLUSTERS
    lane, warp, warps, mine = thread & 31, team * 4 + lax.shift_right_logical(thread, 5), 4 * n.groups, -(-slices // n.parts)
    last, room = jnp.minimum(mine, slices - part * mine), warp * ROOM

    def one(i, carry):
        number = i * warps + warp
        slice_ = part * mine + jnp.minimum(number, last - 1)
        keys, orders = [], []
        for k in range(EACH):
            cluster, score = lane * EACH + k, arrays.spread(0.0, t.THREADS, jnp.float32)
            for j in range(SLICE):  # in the order of `votes.cluster_scores`
                y = arrays.load_shared(numbers, slice_ * SLICE + j)
                score = score + jnp.where((cluster >> j) & 1 > 0, y, -y)
            # Of a cluster and its opposite the one with the better score; of equal scores the lower one is first.
            keys.append(lax.bitcast_convert_type(jnp.abs(score), jnp.int32))
            orders.append(jnp.where(score < 0, cluster, CLUSTERS - 1 - cluster))
        begin = (line * slices + slice_) * CLUSTERS + lane
        counts = [arrays.load(counts_ref, begin + at) for at in range(0, CLUSTERS, 32)]
        worse = _sort(keys, orders)  # the opposites of the clusters, best first, so that these are worst first
        for i, x in enumerate(counts):  # they arrive while the warp sorts
            arrays.store_shared(weights, room + lane + 32 * i, x)
        arrays.store_shared(weights, room + lane + CLUSTERS, arrays.spread(0, t.THREADS))
        better = [CLUSTERS - 1 - x for x in worse]
        assembly.run(["bar.warp.sync -1;"])
        for clusters, from_end in ((better, False), (worse, True)):
            counts = [arrays.load_shared(weights, room + x) for x in clusters]
            total = functools.reduce(jnp.add, counts)
            before = _upto(total) - total
            for cluster, count in zip(clusters, counts, strict=True):
                after = before + count
                reached = zone - after if from_end else before
                votes = sum((reached < x).astype(jnp.int32) for x in cutoffs)
                place = cluster & (HALF - 1)
                word = votes << (8 * (place & (BYTES - 1)) + 4 * lax.shift_right_logical(cluster, 7))
                at = room + CLUSTERS + lax.shift_right_logical(place, 2)
                lines = [".reg .b32 at; mad.lo.s32 at, $1, 4, $0; red.shared.add.u32 [at], $2;"]
                assembly.run(lines, [weights], [at, word])
                before = after
        assembly.run(["bar.warp.sync -1;"])
        word = arrays.load_shared(weights, room + lane + CLUSTERS)
        _write(table, jnp.where(number < last, slice_ * (HALF // BYTES) + lane, -1), word)
        return carry

    lax.fori_loop(0, lax.div(jnp.maximum(last - team * 4 + warps - 1, 0), warps), one, 0)
    bins.meet_all(n.parts)
    if n.parts > 1:
        _gather(table, mine, slices, n)


def _prefetch(ref, width, first, last):
    """Ask for the rows ``first`` to ``last - 1`` of ``width`` bytes each: they come to the level-2 cache."""
    if width % 16 == 0:
        lines = [
            ".reg .pred p; .reg .b64 at; .reg .b32 x, size; mov.u32 x, %tid.x; setp.eq.s32 p, x, 0; sub.s32 size, $2, $1;"
        ]
        lines.append(f"setp.gt.and.s32 p, size, 0, p; mul.lo.s32 size, size, {width}; mad.wide.s32 at, $1, {width}, $0;")
        assembly.run([*lines, "@p cp.async.bulk.prefetch.L2.global [at], size;"], [ref], [first, last])


def _load_ids(ids_ref, row, first, last, n):
    """Load the ids of keys ``first`` int32 [128] and so on, `TOGETHER` of each thread: a list of words int32 [128] of each.

    Keys are counted from ``row`` on; what stands for keys from ``last`` on may be anything.
    """
    slices, count = ids_ref.shape[1], ids_ref.shape[1] // BYTES
    out, kind = TOGETHER * count, f"v{count}.b32" if count > 1 else "b32"
    lines = [
        ".reg .pred p; .reg .b64 at; .reg .b32 x;",
        f"add.s32 x, ${out + 1}, ${out + 3}; mad.wide.s32 at, x, {slices}, ${out};",
    ]
    for k in range(TOGETHER):
        words = ", ".join(f"${k * count + i}" for i in range(count))
        lines.append(f"add.s32 x, ${out + 3}, {k * n.threads}; setp.lt.s32 p, x, ${out + 2};")
        lines.append(f"@p ld.global.nc.{kind} {f'{{{words}}}' if count > 1 else words}, [at + {k * n.threads * slices}];")
    found = assembly.run(lines, [ids_ref], [row, last, first], [jnp.int32] * out)
    return [found[i : i + count] for i in range(0, out, count)]


def _vote(table, tally, votes, words, key, hidden, low, span):
    """Sum up the votes of a thread's key, whose ids are ``words``, plus 1: write and count them; 0 outside of the zone.

    Args:
        table: the tables in shared memory.
        tally: shared memory int32 [128].
        votes: shared memory, a byte for each key.
        words: int32 [128], several.
        key: int32 [128], where its votes go.
        hidden: int32 [128], -1 if the slot is empty, else 0.
        low: int32, the zone's first key.
        span: int32, how many there are.
    """
    lines = [
        f".reg .pred p; .reg .b32 table, m, at, x, a, b, c, d, e; mov.b32 table, $0; {_ALIGN} mov.b32 x, 1; mov.b32 e, 0;"
    ]
    for i in range(len(words)):
        word = f"${7 + i}"
        lines.append(f"and.b32 m, {word}, 0x7f7f7f7f;")
        for byte, name in enumerate("abcd"):
            place = (i * BYTES + byte) * HALF
            lines.append(f"prmt.b32 at, m, table, {0x7650 + byte:#x}; ld.shared.u8 {name}, [at + {place}];")
        # Four bytes of the tables, side by side; of each its upper half where the id's highest bit is set.
        lines.append("mad.lo.s32 a, b, 256, a; mad.lo.s32 c, d, 256, c; mad.lo.s32 a, c, 65536, a;")
        lines.append(f"prmt.b32 m, {word}, 0, 0xba98; shr.u32 b, a, 4; lop3.b32 a, m, b, a, 0xca;")
        if i % 2:  # no half of a byte overflows where two are added
            lines.append("add.s32 a, a, e;")
        if i % 2 or i + 1 == len(words):
            lines.append(f"and.b32 a, a, 0x0f0f0f0f; dp4a.u32.u32 x, a, {EACH_BYTE:#x}, x;")
        lines.append("mov.b32 e, a;")
    lines.append("sub.s32 a, $3, $5; or.b32 a, a, $4; setp.ge.u32 p, a, $6; @p mov.b32 x, 0; add.s32 at, $3, $2;")
    lines.append("st.shared.u8 [at], x; mad.lo.s32 at, x, 4, $1; red.shared.add.u32 [at], 1;")
    assembly.run(lines, [table, tally, votes], [key, hidden, low, span, *words])


def _compare(votes, cut, n):
    """Compare a thread's votes, ``n.run`` bytes, with the cut, which is not 0: masks as `bins.places` takes them."""
    each, masks = next(x for x in (4, 2, 1) if n.run % (BYTES * x) == 0), []
    kind = f"v{each}.b32" if each > 1 else "b32"
    for first in range(0, n.run, 32):
        words = [f"w{i}" for i in range(min(32, n.run - first) // BYTES)]
        lines = [f".reg .b32 at, y, above, least, {', '.join(words)}; mov.u32 at, %tid.x; mad.lo.s32 at, at, {n.run}, $2;"]
        for i in range(0, len(words), each):
            names = ", ".join(words[i : i + each])
            lines.append(f"ld.shared.{kind} {f'{{{names}}}' if each > 1 else names}, [at + {first + BYTES * i}];")
        lines.append(f"mov.b32 $0, 0; mov.b32 $1, 0; sub.s32 above, 127, $3; mul.lo.s32 above, above, {EACH_BYTE:#x};")
        lines.append(f"add.s32 least, above, {EACH_BYTE:#x};")
        for x in reversed(words):
            lines.append(f"add.s32 y, {x}, above; add.s32 {x}, {x}, least;")
            for mask, z in (("$0", "y"), ("$1", x)):  # the highest bits of four bytes become the highest bits of a word
                lines.append(f"and.b32 {z}, {z}, 0x80808080; mul.lo.s32 {z}, {z}, 0x204081; shr.u32 {z}, {z}, 28;")
                lines.append(f"mad.lo.s32 {mask}, {mask}, 16, {z};")
        masks.append(assembly.run([*lines, "xor.b32 $1, $1, $0;"], [votes], [cut], [jnp.int32] * 2))
    return masks


def _list(list_ref, bits, at, slot, place, n):
    """Write this thread's candidates, ``bits`` int32 [128] of its keys, from ``place`` on in the list from ``at`` on.

    A warp writes those of its threads one after the other, neighbours together.
    """
    lines = [".reg .pred p; .reg .b64 to; .reg .b32 slot, bit, below, lane, x, y; mov.u32 x, %laneid; mov.b32 bit, 1;"]
    lines.append("shl.b32 bit, bit, x; sub.s32 below, bit, 1; mov.u32 y, %tid.x; and.b32 y, y, -32; mov.b32 lane, 0;")
    lines.append(f"mad.lo.s32 slot, y, {n.run}, $3; add.s32 slot, slot, x; LANES:")
    for _ in range(4):
        lines.append("shfl.sync.idx.b32 x, $1, lane, 31, -1; shfl.sync.idx.b32 y, $4, lane, 31, -1; add.s32 y, y, $2;")
        lines.append("mad.wide.s32 to, y, 4, $0; and.b32 y, x, below; popc.b32 y, y; mad.wide.s32 to, y, 4, to;")
        lines.append("and.b32 x, x, bit; setp.ne.s32 p, x, 0; @p st.global.b32 [to], slot; add.s32 lane, lane, 1;")
        lines.append(f"add.s32 slot, slot, {n.run};")
    assembly.run([*lines, "setp.lt.s32 p, lane, 32; @p bra LANES;"], [list_ref], [bits, at, slot, place])


def _prepare(query_ref, counts_ref, shares_ref, signs_ref, numbers, capacity, n):
    """Rotate the query, and return the keys of the zone and of each tier, and the number of candidates: int32 scalars."""
    (_, group, dim), (pieces, width), line = query_ref.shape, shares_ref.shape, lax.axis_index("x")
    channel = (arrays.counted(t.THREADS) & (dim // SLICE - 1)) * SLICE  # the first one of a slice
    # All loads are on their way before any is waited for; the query comes first, out of the level-2 cache.
    counts = _first_counts(counts_ref, line)
    query = [arrays.load_run(query_ref, (line * group + g) * dim + channel, SLICE) for g in range(group)]
    shares = [[arrays.scalar(shares_ref, line * 0 + row * width + i) for i in range(width)] for row in range(pieces)]

    @pl.when(n.group() < 1)
    def _():
        mean = functools.reduce(jnp.add, query) / group
        mean = rotated(mean, signs_ref[0], dim) if signs_ref else mean
        place = arrays.repeated(channel, SLICE) + lax.div(arrays.counted(SLICE * t.THREADS), t.THREADS)
        arrays.store_shared(numbers, place, mean)

    zone = assembly.run(["redux.sync.add.s32 $0, $1, -1;"], (), [functools.reduce(jnp.add, counts)], [None])[0]
    best = shares[0]  # of the zone's range of lengths
    for (end, *_), row in zip(shares, shares[1:], strict=False):
        best = [jnp.where(zone >= end, x, y) for x, y in zip(row, best, strict=True)]
    wanted, *cutoffs = (portion(x, zone) for x in best[1:])
    return zone, cutoffs, jnp.minimum(wanted, capacity)


def vote(query_ref, counts_ref, shares_ref, ids_ref, position_ref, stop_ref, signs_ref, list_ref, *scratch, n, heads, first):
    """List the candidates, and return their number.

    Args:
        query_ref: floats [L, G, D].
        counts_ref: int32 [L, N * 256].
        shares_ref: int32 [P, 2 + Z].
        ids_ref: uint8 [L * S, N].
        position_ref: int32 [L, S].
        stop_ref: int32 [B].
        signs_ref: a tuple of none, or of signs float32 [D].
        list_ref: int32 [L, C].
        *scratch: in shared memory the rotated query float32 [128], keys of clusters, tables, counts of votes, votes, sums.
        n: how a list is shared.
        heads: of a row.
        first: first slot of the zone.
    """
    numbers, weights, table, tally, votes, sums = scratch
    most, slots, line = list_ref.shape[1], position_ref.shape[1], lax.axis_index("x")
    slices, mine = ids_ref.shape[1], -(-ids_ref.shape[1] // n.parts)
    step, begin = n.threads * TOGETHER, n.begin()
    row, thread = line * slots + begin, n.group() * t.THREADS + arrays.counted(t.THREADS)
    table_row, first_slice = line * slices, n.part() * mine
    _prefetch(counts_ref, BYTES * CLUSTERS, table_row + first_slice, table_row + jnp.minimum(first_slice + mine, slices))
    _prefetch(ids_ref, slices, row, row + jnp.minimum(AHEAD * step, slots - begin))  # they arrive while tables are made
    bins.clear(tally, bins.BINS, n.threads)
    stop = jnp.minimum(arrays.scalar(stop_ref, lax.div(line, heads)), slots)
    zone, cutoffs, wanted = _prepare(query_ref, counts_ref, shares_ref, signs_ref, numbers, most, n)
    bins.meet_all(1)
    _tables(n, (counts_ref, numbers, weights, table), line, zone, cutoffs)
    low, end, holes = first - begin, jnp.minimum(stop - begin, n.keys), zone != stop - first
    span = jnp.maximum(end - low, 0)

    def add(number, words):
        _prefetch(ids_ref, slices, row + (number + AHEAD) * step, row + jnp.minimum((number + AHEAD + 1) * step, end))
        ahead = _load_ids(ids_ref, row, (number + 1) * step + thread, end, n)
        keys = [number * step + k * n.threads + thread for k in range(TOGETHER)]

        def position(key):
            return arrays.load(position_ref, jnp.where((key >= low) & (key < end), row + key, -1)) >> 31

        # Positions are read only if some slot of the zone is empty.
        hidden = lax.cond(holes, lambda: [position(x) for x in keys], lambda: [arrays.spread(0, t.THREADS)] * TOGETHER)
        for key, mine, gap in zip(keys, words, hidden, strict=True):
            _vote(table, tally, votes, mine, key, gap, low, span)
        return ahead

    last = lax.div(jnp.clip(end, 0, n.size) + step - 1, step)
    lax.fori_loop(0, last, add, _load_ids(ids_ref, row, thread, end, n))
    bins.clear(votes, lax.div(n.size - last * step, BYTES), n.threads, lax.div(last * step, BYTES))
    bins.meet_all(n.parts)
    cut = bins.cut(tally, wanted, n, least=1)
    bins.arrive(n.parts)
    for number, bits, place in bins.places(_compare(votes, cut.bin, n), cut, sums):
        _list(list_ref, bits, line * most, begin + number, place, n)
    bins.wait(n.parts)
    return wanted


def share_of(lists, slots, parts=None, groups=None):
    """Choose how a list is shared: by as many programs as the multiprocessors hold at once, and by few warps."""
    if parts is None:
        parts = next((n for n in (8, 4, 2) if n * lists <= bins.BLOCKS and slots >= n * 512), 1)
        parts = max(parts, next(n for n in (1, 2, 4, 8) if slots <= n * MOST_KEYS))
    keys = -(-slots // parts)
    groups = groups or bins.groups_of(lists * parts, keys // BYTES, most=2 if keys <= 3 * 2**12 else 4)
    return bins.Share(parts, groups, keys, -(-keys // (groups * t.THREADS * TOGETHER)) * TOGETHER)
