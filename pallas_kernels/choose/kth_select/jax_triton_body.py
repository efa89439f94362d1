"""The kernels of `pallas_triton` for long rows in Triton's own language. Only `jax_triton` imports this module.

Keys are made as `pallas_kernels._triton.kth_search.order_key` makes them.
"""

from __future__ import annotations

from pallas_kernels._triton.jax_triton_language import jit, row, tl


@jit
def _key(score):
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits == -2147483648, 0, bits)
    return tl.where(score > float("-inf"), bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)


@jit
def _count(first, more, number, pivot, TILE: tl.constexpr):
    """Count the keys of at least ``pivot`` among ``number`` keys, the first TILE in registers and all at ``more``."""
    hits = (first >= pivot).to(tl.int32)
    for begin in range(TILE, number, TILE):
        at = begin + tl.arange(0, TILE)
        hits += (tl.load(more + at, mask=at < number, other=-2147483648) >= pivot).to(tl.int32)
    return tl.sum(hits, 0)


@jit
def _threshold(first, more, number, low, high, held, wanted, slack, TILE: tl.constexpr):
    """Search as `kth_search.find` does, one pivot per step: the threshold, and how many keys reach and exceed it."""
    reach, over, slow = held, held * 0, held < 0
    while (reach > wanted + slack) & (high > low + 1):
        half = (high >> 1) - (low >> 1)
        part = (reach - wanted - (slack >> 1)).to(tl.float32) / (reach - over).to(tl.float32)
        jump = tl.where(slow, half, 2 * (part * half.to(tl.float32)).to(tl.int32))
        pivot = tl.minimum(tl.maximum(low + jump, low + 1), high - 1)
        found = _count(first, more, number, pivot, TILE)
        enough = found >= wanted
        low, high = tl.where(enough, pivot, low), tl.where(enough, high, pivot)
        reach, over = tl.where(enough, found, reach), tl.where(enough, over, found)
        slow = ((high >> 1) - (low >> 1)) > (half >> 1)
    return low, reach, over


@jit
def _rank(key, threshold, ties, over, equal):
    """Rank a block's keys as `kth_search.rank` does."""
    more, same = (key > threshold).to(tl.int32), (key == threshold).to(tl.int32)
    same_before = equal + tl.cumsum(same, 0) - same
    place = over + tl.cumsum(more, 0) - more + tl.minimum(same_before, ties)
    keep = (more > 0) | ((same > 0) & (same_before < ties))
    return keep, place, over + tl.sum(more, 0), equal + tl.sum(same, 0)


@jit
def maxima(
    score,
    node,
    SLOTS: tl.constexpr,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """Write the greatest key of each node to ``node`` [ROWS, NODES]: entry i of a row belongs to node i mod NODES."""
    of_score = row(0, ROWS, MAPPED) * SLOTS
    here = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    best = tl.full((WIDTH,), -2147483648, tl.int32)
    for step in range(0, (SLOTS + NODES * DEPTH - 1) // (NODES * DEPTH)):
        at = ((step * DEPTH + tl.arange(0, DEPTH)) * NODES)[:, None] + here[None, :]
        found = tl.load(score + of_score + at, mask=at < SLOTS, other=float("-inf"))
        best = tl.maximum(best, tl.max(_key(found), 0))
    tl.store(node + tl.program_id(0) * NODES + here, best)


@jit
def filter(
    score,  # [ROWS, SLOTS]
    node,  # [ROWS, NODES]
    budget,  # [ROWS]
    count,  # [ROWS, SEGMENTS]: candidates of each stretch of STEPS tiles
    edge,  # [ROWS, 2]: the least key of the candidates, and a number above the greatest key
    keys,  # [ROWS, SEGMENTS, STEPS * TILE]
    slots,
    MOST: tl.constexpr,
    SLOTS: tl.constexpr,
    NODES: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """List the candidates of one stretch: entries that reach a threshold which ``wanted`` to 9/8 ``wanted`` maxima reach."""
    out, segment, segments = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    of_score = row(0, ROWS, MAPPED) * SLOTS
    wanted = tl.minimum(tl.maximum(tl.load(budget + row(2, ROWS, MAPPED)), 1), MOST)
    nodes = tl.load(node + row(1, ROWS, MAPPED) * NODES + tl.arange(0, NODES))
    may = nodes > -2147483648
    low, held = tl.min(tl.where(may, nodes, 2147483646), 0), tl.sum(may.to(tl.int32), 0)
    high = tl.maximum(tl.max(nodes, 0), low) + 1
    threshold, _, _ = _threshold(nodes, node, NODES, low, high, held, wanted, wanted >> 3, NODES)
    # With fewer maxima than wanted every entry is a candidate: take the key of the most negative finite number.
    threshold = tl.where(held < wanted, -2147483648 + (1 << 23), threshold)
    tl.store(edge + out * 2, threshold)
    tl.store(edge + out * 2 + 1, high)
    begin, base = segment * STEPS * TILE, (out * segments + segment) * STEPS * TILE
    over, equal = held * 0, held * 0
    for step in range(0, tl.minimum(STEPS, (SLOTS - begin + TILE - 1) // TILE)):
        slot = begin + step * TILE + tl.arange(0, TILE)
        key = _key(tl.load(score + of_score + slot, mask=slot < SLOTS, other=float("-inf")))
        keep, place, over, equal = _rank(key, threshold, wanted, over, equal)
        tl.store(keys + base + place, key, mask=keep)
        tl.store(slots + base + place, slot, mask=keep)
    tl.store(count + out * segments + segment, over + tl.minimum(equal, wanted))


@jit
def choose(
    count,  # as `filter` left them
    edge,
    keys,
    slots,
    budget,
    listed,  # [ROWS, K]
    keep,
    chosen,  # [ROWS]
    more_keys,  # shape of keys: the keys of all segments, one behind the other
    more_slots,
    MOST: tl.constexpr,
    K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    STRETCH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    MAPPED: tl.constexpr,
):
    """List the best of a row's candidates in ascending order."""
    out, number = tl.program_id(0).to(tl.int64), tl.program_id(0) * 0
    of_count, base = row(0, ROWS, MAPPED) * SEGMENTS, out * SEGMENTS * STRETCH
    of_key, of_slot = row(2, ROWS, MAPPED) * SEGMENTS * STRETCH, row(3, ROWS, MAPPED) * SEGMENTS * STRETCH
    for segment in tl.static_range(SEGMENTS):
        number += tl.load(count + of_count + segment)
    # Pack the candidates of all segments: each skips the unused ends of the segments before its own.
    for begin in range(0, number, TILE):
        at = begin + tl.arange(0, TILE)
        source, end = at, number * 0
        for segment in tl.static_range(SEGMENTS - 1):
            found = tl.load(count + of_count + segment)
            end += found
            source += tl.where(at >= end, STRETCH - found, 0)
        tl.store(more_keys + base + at, tl.load(keys + of_key + source, mask=at < number), mask=at < number)
        tl.store(more_slots + base + at, tl.load(slots + of_slot + source, mask=at < number), mask=at < number)
    tl.debug_barrier()  # what follows reads what other threads of this program wrote
    at = tl.arange(0, TILE)
    first = tl.load(more_keys + base + at, mask=at < number, other=-2147483648)
    wanted = tl.minimum(tl.maximum(tl.load(budget + row(4, ROWS, MAPPED)), 0), MOST)
    of_edge = row(1, ROWS, MAPPED) * 2
    low, high = tl.load(edge + of_edge), tl.load(edge + of_edge + 1)
    threshold, reach, above = _threshold(first, more_keys + base, number, low, high, number, wanted, 0, TILE)
    ties, end = tl.where(reach > wanted, wanted - above, number), tl.minimum(number, wanted)
    over, equal = number * 0, number * 0
    for begin in range(0, number, TILE):
        at = begin + tl.arange(0, TILE)
        key = tl.load(more_keys + base + at, mask=at < number, other=-2147483648)
        slot = tl.load(more_slots + base + at, mask=at < number, other=0)
        kept, place, over, equal = _rank(key, threshold, ties, over, equal)
        tl.store(listed + out * K + place, slot, mask=kept & (place < end))
    # Zeros behind the list, and its mask.
    for begin in range(0, K, TILE):
        at = begin + tl.arange(0, TILE)
        tl.store(listed + out * K + at, tl.zeros((TILE,), tl.int32), mask=(at >= end) & (at < K))
        tl.store(keep + out * K + at, at < end, mask=at < K)
    tl.store(chosen + out, end)
