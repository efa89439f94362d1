"""One warp attends to the rows of one step, which are in its ring: products of 16 x 8 numbers that sum over 16.

A query has halves of 8 rows. Of each product with a half, lane l has two neighbouring columns, 2 (l % 4) and the next, of row
l / 4. These are also the entries whose weights the lane then multiplies by values, so that weights need no other lane.

Codes of 8 bits become numbers of 16 bits when they are in registers, where a lane then has four neighbouring channels of a
row instead of two times two. So a product of codes sums over channels in another order, in which the query is loaded, and
sums of values are of the even channels, then of the odd ones.
"""

import functools
import math

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu import warps as w
from pallas_kernels._mosaic_gpu.sizes import ENTRIES, LINE, TILES, Sizes
from pallas_kernels.numerics import LOG2_E


def attend_step(n: Sizes, scale: float, biased: bool, places, query, asked, inv_freq, keep, sums, maximum, total):
    """Attend to a stage.

    Args:
        n: sizes.
        scale: factor of the logits.
        biased: whether the stage has biases.
        places: numbers, the addresses of the stage's keys, values and tags.
        query: for each half of the query and each 8 channels an int32, which is two numbers: of channel 2 (l % 4) of the 8
            and the next; for codes of channel 4 (l % 4) + 2 i of 16 and the next, where these 8 are number i of the 16.
        asked: for each half a position; None: no slot is after the query.
        inv_freq: float32 numbers for the first half of the channels that this lane has of a key, if keys are rotated.
        keep: called with a half and its logits to base 2 of this lane's entries, hidden or not; or None.
        sums: for each half and each 8 channels two sums of values; for codes of even channels of 16, then of odd ones.
        maximum: for each half the largest logit, to base 2.
        total: for each half the softmax denominator of what this lane saw.

    Returns:
        sums, maximum and total after the step.
    """
    tiles = n.dim // 8
    keys, values, tags = places
    positions, biases, (key_scales, value_scales) = _tags(n, tags, biased)
    right = enumerate(_keys(n, keys)) if inv_freq is None else _turned_keys(n, keys, tags, inv_freq)
    logits = _logits(n, right, [query[h * tiles : (h + 1) * tiles] for h in range(n.halves)])
    weights, decays, risen, totals = [], [], [], []
    for half in range(n.halves):
        seen = [x >= 0 if asked is None else (x >= 0) & (x <= asked[half]) for x in positions]
        found = [x * (scale * LOG2_E) for tile in logits for x in tile[half]]
        found = [x * y for x, y in zip(found, key_scales, strict=True)] if key_scales else found
        found = [x if bias is None else x + bias for x, bias in zip(found, biases, strict=True)]
        if keep is not None:
            keep(half, found)
        found = [s.select(x, t.float_number(-math.inf)) for s, x in zip(seen, found, strict=True)]
        top = w.over_quad(functools.reduce(w.most, found), w.most)
        risen.append(w.most(top, maximum[half]))
        shift = (risen[-1] > -math.inf).select(risen[-1], t.float_number(0.0))
        decays.append((maximum[half] - shift).exp2(approx=True))
        shares = [(x - shift).exp2(approx=True) for x in found]
        totals.append(total[half] * decays[-1] + sum(shares[1:], shares[0]))
        if value_scales:
            shares = [s.select(x * y, t.float_number(0.0)) for s, x, y in zip(seen, shares, value_scales, strict=True)]
        weights.append([w.pair(*shares[2 * i : 2 * i + 2], n.dtype) for i in range(TILES)])
    decayed = [[sums[2 * (h * tiles + i) + j] * decays[h] for j in (0, 1)] for h in range(n.halves) for i in range(tiles)]
    return _add_values(n, values, positions, weights, decayed), risen, totals


def _tags(n, place, biased):
    """Load positions, biases, and scales of keys and of values, of this lane's entries."""
    place = place + t.signed(w.lane() % 4) * 8

    def load(kind, first):
        return [x for i in range(TILES) for x in w.load_shared(place, (kind,) * 2, first + 32 * i)]

    positions, biases = load(t.i32(), 0), load(w.f32(), n.biases - n.tags) if biased else [None] * (2 * TILES)
    if n.kind is None:
        return positions, biases, (None, None)
    words = [load(t.i32(), n.scales - n.tags + 4 * ENTRIES * i) for i in range(3)]
    scales = [[w.half_of(x, (y & (1 << i)) > 0) for x, y in zip(words[i], words[2], strict=True)] for i in (0, 1)]
    return positions, biases, scales


def _product(n, left, right, sums):
    """Multiply all halves of the query, two at once, and add to ``sums``, two numbers of each half."""
    added = []
    for half in range(0, n.halves, 2):
        low, high, *_ = *left[half : half + 2], [t.number(0)] * 2
        more = *sums[half : half + 2], [t.float_number(0.0)] * 2
        four = w.multiply((*more[0], *more[1]), (low[0], high[0], low[1], high[1]), right, n.dtype)
        added += [four[:2], four[2:]]
    return added[: n.halves]


def _corner(n, place, by_entries):
    """Return where this lane's row of four matrices of 8 entries and 16 bytes is: next to each other, or entries first."""
    lane = w.lane()
    some, other, row = t.signed(lane // 8 % 2), t.signed(lane // 16), t.signed(lane % 8)
    entries, chunk = (some, other) if by_entries else (other, some)
    if n.tiled:
        return place + (entries * 8 + row) * LINE + (chunk ^ row) * 16
    return place + (entries * 8 + row) * n.pitch + chunk * 16


def _matrices(n, corner, k, transposed=False):
    """Load four matrices of the entries' bytes from 32 k on; in the lines of a tile, chunks of 16 bytes change places."""
    at, offset = (corner ^ 32 * k % LINE, n.block * LINE * (32 * k // LINE)) if n.tiled else (corner, 32 * k)
    return w.load_matrices(at, offset, transposed)


def _keys(n, place):
    """Yield, for each 16 channels, the right side of products with keys: two int32 for each 8 entries."""
    if n.kind is None:
        corner = _corner(n, place, by_entries=False)
        for k in range(n.dim // 16):
            four = _matrices(n, corner, k)
            yield four[:2], four[2:]
        return
    corner = _corner(n, place, by_entries=True)
    for k in range(n.dim // 32):
        four = _matrices(n, corner, k)
        for two in (four[:2], four[2:]):
            yield [[w.decode(x, i, i + 1, n.kind, n.dtype) for i in (0, 2)] for x in two]


def _values(n, place, masks):
    """Yield, for each 8 channels, the right side of products with values: two int32."""
    corner = _corner(n, place, by_entries=True)
    for k in range(n.width // 32):
        four = [x & masks[i % 2] for i, x in enumerate(_matrices(n, corner, k, transposed=True))]
        for two in (four[:2], four[2:]):
            if n.kind is None:
                yield two
            else:
                yield from ([w.decode(x, i, i + 2, n.kind, n.dtype) for x in two] for i in (0, 1))


def _turned_keys(n, place, tags, inv_freq):
    """Yield number and right side of products with each 16 channels of keys, which are rotated to their places.

    A lane has the channels i and i + D / 2 of the same key.
    """
    corner, half = _corner(n, place, by_entries=False), n.dim // 32
    own = tags + t.signed(w.lane() // 4) * 4
    entries = [w.load_word(own, n.biases - n.tags + 32 * i) for i in range(TILES)]
    for k in range(half):
        pairs = zip(*(_matrices(n, corner, i) for i in (k, k + half)), strict=True)
        turned = []
        for at, pair in enumerate(pairs):
            (a, b), frequencies = (w.parted(x, n.dtype) for x in pair), inv_freq[4 * k + 2 * (at % 2) :][:2]
            angles = [w.cosine_sine(entries[at // 2], x) for x in frequencies]
            first = [x * cos - y * sin for x, y, (cos, sin) in zip(a, b, angles, strict=True)]
            second = [y * cos + x * sin for x, y, (cos, sin) in zip(a, b, angles, strict=True)]
            turned.append([w.pair(*x, n.dtype) for x in (first, second)])
        for i, four in zip((k, k + half), zip(*turned, strict=True), strict=True):
            yield i, (four[:2], four[2:])


def _logits(n, right_sides, query):
    """Multiply queries and keys: for each 8 entries and each half two numbers."""
    sums = [[[t.float_number(0.0)] * 2] * n.halves for _ in range(TILES)]
    for k, keys in right_sides:
        left = [half[2 * k : 2 * k + 2] for half in query]
        sums = [_product(n, left, right, x) for right, x in zip(keys, sums, strict=True)]
    return sums


def _add_values(n, place, positions, weights, sums):
    """Add values with their weights; the row of a slot without a token may hold anything, so its bits become 0."""
    tiles, none = n.dim // 8, t.number(0)
    low, high = ((x >= 0).select(t.number(0xFFFF), none) for x in positions[::2]), positions[1::2]
    masks = [x | (y >= 0).select(t.number(-0x10000), none) for x, y in zip(low, high, strict=True)]
    for i, right in enumerate(_values(n, place, masks)):
        sums[i::tiles] = _product(n, weights, right, sums[i::tiles])
    return [x for two in sums for x in two]
