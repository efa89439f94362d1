"""Estimates of the candidates, the best of them and the list, on Mosaic GPU: a cluster of programs has a list.

1. Warps estimate their candidates, each for itself (`lookup`).
2. The best are found digit by digit: the keys are counted by their highest seven bits, those at the cut by the next seven.
   Where programs share a list that takes few, each finds its own best alone; then all meet once, and each of those counts the
   better ones of all programs, which is its place. A digit costs a barrier of the cluster and reads of all programs.
3. Each thread writes its candidates in order; the programs share out the rest of the list.
"""

import functools

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays, assembly, bins
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._triton.kth_search import NEVER, order_key
from pallas_kernels.choose.pariskv.choice.lookup import estimate, room_for, width_of
from pallas_kernels.formats.key_codes import LEVEL

DIGIT = 7  # bits of a key that are counted together
MANY = 2**30  # more than any list has
FEW = 128  # best candidates that programs of a cluster find alone; they have as many places for keys, for slots and for ranks
MOST = 2**14  # candidates of a program of 512 threads, 32 each
ROOM = 7 * 2**12  # words of a program's estimates, beside the codes that are on their way
LEAST = float(jnp.finfo(jnp.float32).min)


def _count(tally, keys, low, width, shift, first, n):
    """Count the keys from ``low`` to ``low + width``, all without signs, by their bits from ``shift`` on."""
    names = "abcd"[: 4 if n.run % 4 == 0 else 2]  # loaded together: an atomic addition waits for its key
    lines = [".reg .pred p, q; .reg .b32 at, i, bins, a, b, c, d; mov.b32 i, 0; mov.u32 at, %tid.x;"]
    lines.append("mad.lo.s32 at, at, 4, $1; mad.lo.s32 bins, $5, 4, $0; KEYS:")
    lines += [f"ld.shared.b32 {x}, [at + {4 * k * n.threads}];" for k, x in enumerate(names)]
    for x in names:
        lines.append(f"setp.ne.s32 q, {x}, 0; sub.s32 {x}, {x}, $2; setp.lt.and.u32 p, {x}, $3, q; shr.u32 {x}, {x}, $4;")
        lines.append(f"mad.lo.s32 {x}, {x}, 4, bins; @p red.shared.add.u32 [{x}], 1;")
    lines.append(f"add.s32 at, at, {4 * n.threads * len(names)}; add.s32 i, i, {len(names)}; setp.lt.s32 p, i, {n.run};")
    assembly.run([*lines, "@p bra KEYS;"], [tally, keys], [low, width, shift, first])


def _list(refs, bits, at, entry, place, n):
    """Write this thread's best candidates, ``bits`` int32 [128] of those from ``entry`` on; the best begin at ``at``.

    ``refs`` are the list int32 [L, K], the mask bool [L, K] and the slots int32 [L, C].
    """
    begin = "add.s32 x, $4, $6; mad.wide.s32 to, x, 4, $0; mad.wide.s32 mask, x, 1, $1; mov.u32 x, %tid.x; mov.b32 one, 1;"
    begin += f"mad.lo.s32 x, x, {n.run}, $5; mad.wide.s32 from, x, 4, $2;"
    step = "mad.wide.s32 at, i, 4, from; ld.global.b32 x, [at]; st.global.b32 [to], x; st.global.u8 [mask], one;"
    step += "add.s64 to, to, 4; add.s64 mask, mask, 1;"
    bins.for_each(bits, refs, [at, entry, place], ".reg .b64 to, mask, from, at; .reg .b32 one;", begin, step)


def _join(n, keys, dim, live, scale):
    """Join the parts of this program's first ``live`` estimates, and put keys that sort as they do in their place."""

    def one(i, carry):
        number = i * n.threads + n.group() * t.THREADS + arrays.counted(t.THREADS)
        parts = [arrays.load_shared(keys, number + at) for at in range(0, dim // width_of(dim) * n.size, n.size)]
        total = functools.reduce(jnp.add, [lax.bitcast_convert_type(x, jnp.float32) for x in parts]) * (scale * LEVEL)
        total = jnp.where(total == 0, 0.0, total)
        total = jnp.where(total < LEAST, LEAST, total)  # NaN stays, and is never chosen
        arrays.store_shared(keys, number, order_key(jnp.where(number < live, total, -jnp.inf)) ^ NEVER)
        return carry

    lax.fori_loop(0, n.run, one, 0)
    bins.meet_all(1)


def _search(n, keys, tally, wanted):
    """Find the best ``wanted`` keys, digit by digit, of those that are not 0.

    Returns:
        The least key that they may have, how many keys from there on may tie, and the cut of the last digit, with all keys
        above before this program's and all that are counted.
    """

    def unsettled(state):
        shift, _, _, _, cut = state
        return (shift >= 0) & (cut[2] > cut[1])

    def narrow(state):
        shift, low, width, first, (_, left, _, above, _, total) = state
        _count(tally, keys, low, width, shift, first, n)
        bins.meet_all(n.parts)
        cut = bins.cut(tally, left, n, first)
        bins.clear(tally, bins.BINS, n.threads, bins.BINS - first)  # all programs have read what is there
        bins.meet_all(1)
        low, width = low + lax.shift_left(cut.bin, shift), lax.shift_left(jnp.int32(1), shift)
        cut = cut._replace(above_before=above + cut.above_before, total=jnp.maximum(total, cut.total))
        return jnp.where(shift > 0, jnp.maximum(shift - DIGIT, 0), -1), low, width, bins.BINS - first, tuple(cut)

    zero = jnp.int32(0)
    state = jnp.int32(32 - DIGIT), zero, jnp.int32(-1), zero, (zero, wanted, jnp.int32(MANY), zero, zero, zero)
    _, low, width, _, cut = lax.while_loop(unsettled, narrow, state)
    return low, width, bins.Cut(*cut)


def _publish(refs, bits, place, first, n):
    """Write keys and numbers of this thread's best candidates to this program's places, see `FEW`."""
    begin = f"mad.lo.s32 to, $3, 4, $1; mov.u32 x, %tid.x; mad.lo.s32 number, x, {n.run}, {first};"
    begin += "mad.lo.s32 key, number, 4, $0;"
    step = "mad.lo.s32 x, i, 4, key; ld.shared.b32 x, [x]; st.shared.b32 [to], x;"
    step += f"add.s32 x, number, i; st.shared.b32 [to + {4 * FEW}], x; add.s32 to, to, 4;"
    bins.for_each(bits, refs, [place], ".reg .b32 to, key, number;", begin, step)


def _meet_best(places, every, found, most, n):
    """Copy the best keys of all programs, ``most`` of each at most, to ``every``; return how many were ``found`` in all."""
    arrays.store_shared(places, arrays.counted(t.THREADS) * 0 + 3 * FEW, arrays.spread(found, t.THREADS))
    bins.meet_all(n.parts)
    lines = [".reg .pred p; .reg .b32 i, at, to, x, y; mov.b32 $0, 0;"]
    for peer in range(n.parts):
        lines.append(f"add.s32 at, $1, {12 * FEW}; mapa.shared::cluster.u32 at, at, {peer}; ld.shared::cluster.b32 x, [at];")
        lines.append("add.s32 $0, $0, x;")
    lines.append(f"mov.u32 i, %tid.x; COPY: setp.ge.s32 p, i, {n.parts * FEW}; @p bra DONE; and.b32 x, i, {FEW - 1};")
    lines.append(f"shr.u32 y, i, {FEW.bit_length() - 1}; mad.lo.s32 at, x, 4, $1; mapa.shared::cluster.u32 at, at, y;")
    lines.append(f"setp.lt.s32 p, x, {-(-most // 4) * 4}; @p ld.shared::cluster.b32 x, [at]; mad.lo.s32 to, i, 4, $2;")
    lines.append(f"@p st.shared.b32 [to], x; add.s32 i, i, {n.threads}; bra COPY; DONE: mov.b32 i, 0;")
    total = assembly.run(lines, [places, every], (), [None])[0]
    bins.arrive(n.parts)
    bins.meet_all(1)
    return total


def _rank(places, every, most, n):
    """Count for each of this program's best keys those of all programs that stand before it; of equal keys the earlier one.

    The warpgroups share out the programs, and add what they count to the ranks.
    """
    each, one = -(-most // 4) * 4, "@p add.f32 sum, sum, 0f3F800000;"  # by another unit than the one that compares
    lines = [".reg .pred p; .reg .f32 sum; .reg .b32 j, k, x, least, peer, at, a, b, c, d, e; mov.f32 sum, 0f00000000;"]
    lines.append(f"mov.u32 j, %tid.x; shr.u32 peer, j, 7; and.b32 j, j, {FEW - 1}; mad.lo.s32 at, j, 4, $0;")
    lines.append(f"ld.shared.b32 x, [at]; PEER: setp.ge.s32 p, peer, {n.parts}; @p bra DONE;")
    lines.append(f"mad.lo.s32 at, peer, {4 * FEW}, $1; mov.b32 k, 0; mov.b32 least, x;")
    # A key of an earlier program only has to be as large.
    lines.append("setp.lt.s32 p, peer, $2; @p sub.s32 least, least, 1; setp.eq.s32 p, peer, $2; @p bra OWN;")
    lines.append("OTHER: ld.shared.v4.b32 {a, b, c, d}, [at]; add.s32 at, at, 16; add.s32 k, k, 4;")
    lines += [f"setp.gt.u32 p, {y}, least; {one}" for y in "abcd"]
    lines.append(f"setp.lt.s32 p, k, {each}; @p bra OTHER; bra NEXT;")
    lines.append("OWN: ld.shared.v4.b32 {a, b, c, d}, [at]; add.s32 at, at, 16;")
    for i, y in enumerate("abcd"):
        lines.append(f"add.s32 e, k, {i}; setp.lt.s32 p, e, j; @p add.s32 {y}, {y}, 1;")
        lines.append(f"setp.gt.u32 p, {y}, x; {one}")
    lines.append(f"add.s32 k, k, 4; setp.lt.s32 p, k, {each}; @p bra OWN;")
    lines.append(f"NEXT: add.s32 peer, peer, {n.groups}; bra PEER;")
    lines.append(f"DONE: cvt.rzi.s32.f32 e, sum; mad.lo.s32 at, j, 4, $0; red.shared.add.u32 [at + {8 * FEW}], e;")
    assembly.run(lines, [places, every], [n.part()])
    bins.meet_all(1)


def _best_of_all(n, refs, keys, tally, totals, places, wanted, entry, at, most):
    """Write the best ``wanted`` of all programs at ``at`` and behind it, and return how many candidates there are, or more.

    ``refs`` are as in `_list`; ``most`` is at least ``wanted``, and ``entry`` this program's first candidate.
    """
    list_ref, mask_ref, slots_ref = refs
    places, every = places
    alone = n._replace(parts=1)
    low, width, cut = _search(alone, keys, tally, wanted)
    for first, bits, place in bins.choose(keys, n.run, low, width, cut, totals):
        _publish((keys, places), bits, place, first, n)
    total = _meet_best(places, every, jnp.minimum(cut.total, wanted), most, n)
    key, number = (arrays.load_shared(places, arrays.counted(t.THREADS) + i * FEW) for i in range(2))
    slot = arrays.load(slots_ref, jnp.where(key != 0, entry + number, -1))  # arrives while candidates are ranked
    _rank(places, every, most, n)
    rank = arrays.load_shared(places, arrays.counted(t.THREADS) + 2 * FEW)
    shown = (key != 0) & (rank < wanted) & (n.group() < 1)
    where = jnp.where(shown, at + rank, -1)
    arrays.store(list_ref, where, slot)
    arrays.store(mask_ref, where, arrays.spread(1, t.THREADS))
    return total


def best(
    query, slots_ref, count, rows_ref, position_ref, cursor_ref, stop_ref, limits_ref, list_ref, mask_ref,
    *scratch, n, regions, heads, scale,
):  # fmt: skip
    """List the best candidates and what is near.

    Args:
        query: float32 [128] in shared memory.
        slots_ref: int32 [L, C], the candidates of a list.
        count: int32, how many there are.
        rows_ref: uint8 [L * S, D].
        position_ref: int32 [L, S].
        cursor_ref: int32 [B].
        stop_ref: int32 [B].
        limits_ref: int32 [2], the budget, and how many stored tokens are enough.
        list_ref: int32 [L, K].
        mask_ref: bool [L, K].
        *scratch: in shared memory parts of the estimates, then keys; codes; two counts of digits; sums; maybe places of this
            program's best, and the best keys of all programs.
        n: how a list is shared.
        regions: of the list.
        heads: of a row.
        scale: of the estimates.
    """
    keys, codes, tally, totals, *places = scratch
    line, candidates, stored = lax.axis_index("x"), slots_ref.shape[1], position_ref.shape[1]
    bins.clear(tally, 2 * bins.BINS, n.threads)
    if places:
        bins.clear(places[0], 4 * FEW, n.threads)
    cursor, stop = (arrays.scalar(ref, lax.div(line, heads)) for ref in (cursor_ref, stop_ref))
    dense = (cursor < arrays.scalar(limits_ref, line * 0 + 1)) | (stop <= regions.sinks)
    wanted = jnp.where(~dense, jnp.clip(arrays.scalar(limits_ref, line * 0), 0, regions.best), 0)
    live = jnp.where(~dense, jnp.clip(count - n.begin(), 0, n.keys), 0)
    estimate(n, query, slots_ref, rows_ref, keys, codes, live, stored)
    _join(n, keys, rows_ref.shape[1], live, scale)
    # The chosen stand behind the sinks. All programs share out the rest: sinks, the tail, entries that nothing fills. What
    # they read arrives during the search.
    share = arrays.size_of(-(-regions.size // (n.parts * n.groups)))
    place = (n.part() * n.groups + n.group()) * share + arrays.counted(share)
    behind = place - (regions.sinks + regions.best)
    slot = jnp.where(dense, place, jnp.where(behind >= 0, stop + behind, jnp.minimum(place, regions.sinks)))
    near = (place < regions.sinks) | ((behind >= 0) & (behind < regions.tail))
    listed = (place < regions.size) & (dense | near) & (slot < jnp.minimum(cursor, stored))
    slot = jnp.clip(slot, 0, stored - 1)
    held = arrays.load(position_ref, jnp.where(listed, line * stored + slot, -1), -1) >= 0

    at, entry, refs = line * regions.size + regions.sinks, line * candidates + n.begin(), (list_ref, mask_ref, slots_ref)
    if places:
        total = _best_of_all(n, refs, keys, tally, totals, places, wanted, entry, at, regions.best)
    else:
        low, width, cut = _search(n, keys, tally, wanted)
        bins.arrive(n.parts)
        total = cut.total
        for first, bits, to in bins.choose(keys, n.run, low, width, cut, totals):
            _list(refs, bits, at, entry + first, to, n)

    rest = (place < regions.size) & ((place < regions.sinks) | (place >= regions.sinks + jnp.minimum(wanted, total)))
    where = jnp.where(rest, line * regions.size + place, -1)
    arrays.store(list_ref, where, slot)
    arrays.store(mask_ref, where, held.astype(jnp.int32))
    bins.wait(n.parts)


def most_of(dim):
    """Return how many candidates a program can have."""
    return min(MOST, ROOM * width_of(dim) // dim // 1024 * 1024)


def share_of(lists, candidates, dim, parts=None, groups=None):
    """Choose how a list is shared: by as many programs as the multiprocessors hold at once."""
    if parts is None:
        parts = next((n for n in (8, 4, 2) if n * lists <= bins.BLOCKS and candidates >= n * 256), 1)
        parts = max(parts, next(n for n in (1, 2, 4, 8) if candidates <= n * most_of(dim)))
    keys = -(-candidates // parts)
    words = arrays.size_of(keys) * dim // width_of(dim) + room_for(1, dim) + 3 * bins.BINS
    groups = groups or bins.groups_of(lists * parts, words, most=2 if keys <= 1024 else 4)
    return bins.Share(parts, groups, keys, -(-keys // (groups * t.THREADS * 2)) * 2)
