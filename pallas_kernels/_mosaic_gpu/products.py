"""One warp attends to the rows of one step, which are in its ring: products of 16 x 8 numbers that sum over 16.

A query has halves of 8 rows. Of each product with a half, lane l has two neighbouring columns, 2 (l % 4) and the next, of row
l / 4. These are also the entries whose weights the lane then multiplies by values, so that weights need no other lane.
"""

import functools

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.sizes import ENTRIES, TILES, Sizes
from pallas_kernels.numerics import LOG2_E


def attend_step(n: Sizes, scale: float, biased: bool, place, query, asked, sums, maximum, total):
    """Attend to a stage of the ring at ``place``.

    Args:
        n: sizes.
        scale: factor of the logits.
        biased: whether the stage has biases.
        place: a number, the address.
        query: for each half of the query and each 8 channels an int32, which is two numbers.
        asked: for each half a position; None: no slot is after the query.
        sums: for each half and each 8 channels two sums of values.
        maximum: for each half the largest logit, to base 2.
        total: for each half the softmax denominator of what this lane saw.

    Returns:
        sums, maximum and total after the step.
    """
    tiles = n.dim // 8
    positions, biases = _tags(n, place, biased)
    logits = _logits(n, place, [query[h * tiles : (h + 1) * tiles] for h in range(n.halves)])
    weights, decays, risen, totals = [], [], [], []
    for half in range(n.halves):
        seen = [x >= 0 if asked is None else (x >= 0) & (x <= asked[half]) for x in positions]
        found = [x * (scale * LOG2_E) for tile in logits for x in tile[half]]
        found = [x if bias is None else x + bias for x, bias in zip(found, biases, strict=True)]
        found = [s.select(x, t.number(-t.INFINITY)) for s, x in zip(seen, found, strict=True)]
        top = t.over_quad(functools.reduce(t.most, found), t.most)
        risen.append(t.most(top, maximum[half]))
        shift = (risen[-1] > -t.INFINITY).select(risen[-1], t.number(0.0))
        decays.append((maximum[half] - shift).exp2(approx=True))
        shares = [(x - shift).exp2(approx=True) for x in found]
        totals.append(total[half] * decays[-1] + sum(shares[1:], shares[0]))
        weights.append([t.pair(*shares[2 * i : 2 * i + 2], n.dtype) for i in range(TILES)])
    decayed = [[sums[2 * (h * tiles + i) + j] * decays[h] for j in (0, 1)] for h in range(n.halves) for i in range(tiles)]
    return _values(n, place, positions, weights, decayed), risen, totals


def _tags(n, place, biased):
    """Load positions and biases of this lane's entries."""
    place = place + t.signed(t.lane() % 4) * 8

    def load(kind, first):
        return [x for i in range(TILES) for x in t.load_shared(place, (kind,) * 2, first + 32 * i)]

    return load(t.i32(), n.tags), load(t.f32(), n.biases) if biased else [None] * (2 * TILES)


def _product(n, left, right, sums):
    """Multiply all halves of the query, two at once, and add to ``sums``, two numbers of each half."""
    added = []
    for half in range(0, n.halves, 2):
        low, high, *_ = *left[half : half + 2], [t.number(0)] * 2
        more = *sums[half : half + 2], [t.number(0.0)] * 2
        four = t.multiply((*more[0], *more[1]), (low[0], high[0], low[1], high[1]), right, n.dtype)
        added += [four[:2], four[2:]]
    return added[: n.halves]


def _logits(n, place, query):
    """Multiply queries and keys: for each 8 entries and each half two numbers."""
    lane = t.lane()
    corner = place + t.signed(lane // 16 * 8 + lane % 8) * n.pitch + t.signed(lane // 8 % 2) * 16
    sums = [[[t.number(0.0)] * 2] * n.halves for _ in range(TILES)]
    for k in range(n.dim // 16):
        left, right = [half[2 * k : 2 * k + 2] for half in query], t.load_matrices(corner, 32 * k)
        sums = [_product(n, left, right[2 * i : 2 * i + 2], sums[i]) for i in range(TILES)]
    return sums


def _values(n, place, positions, weights, sums):
    """Add values with their weights; the row of a slot without a token may hold anything, so its bits become 0."""
    tiles, lane, none = n.dim // 8, t.lane(), t.number(0)
    low, high = ((x >= 0).select(t.number(0xFFFF), none) for x in positions[::2]), positions[1::2]
    masks = [x | (y >= 0).select(t.number(-0x10000), none) for x, y in zip(low, high, strict=True)]
    corner = place + t.signed(lane // 8 % 2 * 8 + lane % 8) * n.pitch + t.signed(lane // 16) * 16
    for k in range(n.dim // 16):
        right = t.load_matrices(corner, ENTRIES * n.pitch + 32 * k, transposed=True)
        right = [x & masks[i % 2] for i, x in enumerate(right)]
        for i in (2 * k, 2 * k + 1):
            added = _product(n, weights, right[2 * (i % 2) : 2 * (i % 2) + 2], sums[i::tiles])
            sums[i::tiles] = added
    return [x for two in sums for x in two]
