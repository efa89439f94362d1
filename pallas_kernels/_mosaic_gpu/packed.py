"""Packed vectors on Mosaic GPU: 16 at a time become the left operand of a product on tensor cores, in registers.

Four lanes of a warp share a key, as `mma` wants it: each has a quarter of its channels, and of two keys. Eight lanes share a
value, and each has an eighth of four values, of which permutations make columns. What vectors keep lies in shared memory as
words of two neighbours, one word for each. So one load brings what any two channels may need, and a permutation of bytes puts
a number, or zero, in either half. Which permutation, and how far to go on, are looked up by a permutation too, for four pairs
of channels at once; sums of four bytes are one instruction. Nothing is loaded for two channels that are not kept: the other
lanes meet in fewer banks of shared memory.
"""

import dataclasses
import functools
import itertools
import math
import operator
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu import warps as w
from pallas_kernels._mosaic_gpu.pallas import pl, plgpu
from pallas_kernels._mosaic_gpu.steps import numbers, scalar
from pallas_kernels.machine import current_machine
from pallas_kernels.numerics import LOG2_E

VECTORS = 16  # of a step of a warp
HEADS = 4  # query heads of a product, with two terms of each
MOST_QUERIES = 8  # of a KV head
START = 2  # steps in the time in which a program begins and ends
CARDS = "an NVIDIA GPU of compute capability 8.0 or above"
SIZES = f"{CARDS}, D of 32 to 256 in 16 bits, r a multiple of 8, G up to {MOST_QUERIES}"
WORD, HALF = 32, 16  # channels of a word of a bitmap, and those of a lane that are unpacked together


@dataclasses.dataclass(frozen=True)
class Vectors:
    """Sizes of packed vectors, of the queries that meet them, and of a warp's shared memory.

    Attributes:
        dim, rank: channels, and values of a vector.
        group: query heads.
        stored, terms: numbers whose sum is a channel of a query, and how many of them are multiplied, an even number.
        dtype: of values and terms.
    """

    dim: int
    rank: int
    group: int
    stored: int
    terms: int
    dtype: Any

    @property
    def channels(self):
        """Channels that a lane has of a vector."""
        return self.dim // 4

    @property
    def groups(self):
        """Products of a vector with some heads."""
        return -(-self.group // HEADS)

    @property
    def loads(self):
        """Values of 16 bytes that a lane loads of a vector."""
        return -(-self.rank // WORD)

    @property
    def bits(self):
        """Words of a bitmap that a lane loads."""
        return -(-self.channels // WORD)

    @property
    def pitch(self):
        """Bytes of a vector in shared memory: a word for each value, and one that may be written in front of it."""
        return 4 * self.rank + 16

    @property
    def room(self):
        """Bytes of a warp's vectors in shared memory."""
        return VECTORS * self.pitch + 16

    def check(self):
        """Raise ``NotImplementedError`` for sizes and dtypes that the functions here do not take."""
        if not current_machine().has_kernels:
            raise NotImplementedError(f"got {current_machine()}, expected {CARDS}")
        if self.dim not in (32, 64, 128, 256) or self.rank % 8 or str(self.dtype) not in ("bfloat16", "float16"):
            raise NotImplementedError(
                f"got {self.rank} of {self.dim} channels in {self.dtype}, expected 8, 16, ... of 32, 64, 128, 256 in 16 bits"
            )
        if self.group > MOST_QUERIES:
            raise NotImplementedError(f"got {self.group} query heads, expected at most {MOST_QUERIES}")


def shares_of(lists: int, steps: int, programs: int) -> tuple[int, int]:
    """Choose how many steps a program takes, and how many each list has, so that all end soonest if ``programs`` run at once.

    A list has at least ``steps``. Programs share all lists evenly, or each takes a part of one list if that is sooner.
    """

    def end(part):
        return -(-lists * -(-steps // part) // programs) * (part + START)

    part = min(range(1, steps + 1), key=lambda x: (end(x), x))
    even = -(-lists * steps // programs)
    if even + START * (-(-even // steps) + 1) < end(part):  # it starts in each list of its share
        return even, steps
    return part, -(-steps // part) * part


def for_each_list(low, steps: int, size: int, lists: int, run) -> None:
    """Call ``run(list, None)`` for each list, of ``size`` steps, that has some of the ``steps`` from ``low`` on."""
    first = lax.div(low, size)
    if size % steps:
        lax.fori_loop(first, jnp.minimum(lax.div(low + (steps - 1), size) + 1, lists), run, None)
    else:  # of one list
        pl.when(first < lists)(lambda: run(first, None))


def warp():
    """Return the index of this warp in its program."""
    return t.signed(t.thread() // w.LANES)


def quad():
    """Return which quarter of a vector this lane has."""
    return t.signed(w.lane() % 4)


def eighth():
    """Return which eighth of a value this lane has."""
    return t.signed(w.lane() // 4)


def load_queries(n: Vectors, parts, head):
    """Load the terms of all heads in one basis: int32 [128 * N].

    Column i of product j has term ``2 * (j % 2) + i % 2`` of head ``i / 2`` of the four ``j / 2``.

    Args:
        n: sizes.
        parts: a ref [L * M * G * N, D].
        head: int32, the row of the first head and term.
    """
    products, words = n.groups * n.terms // 2, n.channels // 2

    @plgpu.inline_mgpu(arg_types=(t.ref(), t.splat()), return_type=numbers(products * words, jnp.int32))
    def run(ctx, parts, head):
        column, found = t.signed(w.lane() // 4), []
        for product in range(products):
            group, pair = divmod(product, n.terms // 2)
            row = t.least((column >> 1) + group * HEADS, n.group - 1) * n.stored
            term = (column & 1) + 2 * pair
            place = t.element(scalar(head) + row + t.least(term, n.stored - 1), n.dim, quad() * n.channels)
            for at in range(0, words, 4):
                some = t.load_words(t.at(t.address(parts), place, 2), 4 * at, min(words, 4))
                found += [(term < n.stored).select(x, t.number(0)) for x in some]
        return t.made_of(found)

    return run(parts, head)


def load_vectors(n: Vectors, values, bitmap, row, seen):
    """List what this lane loads of two vectors: of each 16 bytes of values or more, and its words of the bitmap.

    A vector that is not ``seen`` has no bits.
    """
    found = []
    for x, held in zip(row, seen, strict=True):
        read = held.select(x, t.number(0))
        for load in range(n.loads):
            chunk = t.least(quad() + 4 * load, n.rank // 8 - 1)  # lanes behind the last one repeat it
            found += t.load_words(t.at(t.address(values), t.element(read, n.rank, chunk * 8), 2), 0, 4)
        bits = quad() * n.channels
        words = t.load_words(t.at(t.address(bitmap), t.element(read, n.dim // WORD, bits >> 5), 4), 0, n.bits)
        if n.channels < WORD:
            words = [(words[0] >> (bits & (WORD - 1))) & ((1 << n.channels) - 1)]
        found += [held.select(x, t.number(0)) for x in words]
    return found


def load_whole(n: Vectors, ref, row, first, channels: int):
    """List ``channels`` of vectors that are not packed, from ``first`` on, two in a word; zeros where ``row`` is negative."""
    found = []
    for x in row:
        held = x >= 0
        place = t.at(t.address(ref), t.element(held.select(x, t.number(0)), n.dim, first), 2)
        for at in range(0, channels // 2, 4):
            found += [held.select(y, t.number(0)) for y in t.load_words(place, 4 * at, min(channels // 2, 4))]
    return found


def placed(n: Vectors, loaded, place, lay):
    """Put the values of two vectors into a warp's shared memory at ``place``, and ``lay`` their channels out in lanes."""
    each, firsts = 4 * n.loads + n.bits, []
    w.meet_warp()
    for vector in (0, 1):
        to, one = place + 16 + t.signed(w.lane() // 4) * n.pitch + vector * 8 * n.pitch, loaded[vector * each :][:each]
        for load in range(n.loads):
            chunk, pairs = to + t.least(quad() + 4 * load, n.rank // 8 - 1) * 32, one[4 * load : 4 * load + 4]
            between = [w.permuted(x, y, w.MIDDLE) for x, y in zip(pairs, [*pairs[1:], pairs[-1]], strict=True)]
            for half in (0, 2):
                w.store_shared(chunk, [pairs[half], between[half], pairs[half + 1], between[half + 1]], None, 8 * half)
            firsts.append((chunk, pairs[0]))
    w.meet_warp()
    for chunk, x in firsts:
        w.store_half(chunk, x, -2)  # the successor of the last value of the lane before
    w.meet_warp()
    return lay(n, [loaded[each - n.bits : each], loaded[-n.bits :]], place + 16)


def in_rows(n: Vectors, bits, place):
    """List bits and first value of this lane's quarter of each of its two vectors."""
    before, place = _before(bits, quad(), 1, (1, 2)), place + t.signed(w.lane() // 4) * n.pitch
    return [(x, y + place + i * (8 * n.pitch)) for i, (x, y) in enumerate(zip(bits, before, strict=True))]


def in_columns(n: Vectors, bits, place):
    """List bits and first value of this lane's `eighth` of each of four vectors, see `of_columns`."""
    share, second = n.channels // 2, eighth() & 1
    words = [of_columns(x) for x in zip(*bits, strict=True)]
    if n.bits == 1:
        mine = [[(x >> second * share) & ((1 << share) - 1)] for x in words[0]]
    else:
        mine = [[(second > 0).select(y, x)] for x, y in zip(*words, strict=True)]
    before, place = _before(mine, eighth(), 4, (1, 2, 4)), place + quad() * (2 * n.pitch)
    return [(x, y + place + (i % 2 + i // 2 * 8) * n.pitch) for i, (x, y) in enumerate(zip(mine, before, strict=True))]


def of_columns(rows):
    """Return what lanes of this lane's quarter have for vectors 2 q, 2 q + 1, and 8 behind each, of a number of each row."""
    source = quad() * 8 + (eighth() >> 1)
    return [w.lane_value(x, source + 4 * i) for x in rows for i in (0, 1)]


def _before(bits, index, distance: int, steps):
    """Count the bytes of what lanes of lower ``index`` have of each vector; the next index is ``distance`` lanes behind."""
    count = functools.reduce(operator.add, [t.popcount(x) << 8 * i for i, words in enumerate(bits) for x in words])
    behind = count
    for step in steps:
        behind = behind + (index >= step).select(t.shuffle_up(behind, distance * step), t.number(0))
    return [((behind - count) >> 8 * i & 255) * 4 for i in range(len(bits))]


def unpacked(n: Vectors, vectors):
    """Unpack vectors that are `placed`, 16 of this lane's channels or all at a time: a list of pairs for each."""
    channels, places = 2 * n.channels // len(vectors), [place - 4 for _, place in vectors]
    two = channels == HALF  # vectors share a word
    for first in range(0, channels, HALF):
        each = []
        for i, (bits, _) in enumerate(vectors):
            half, word = first // HALF % 2, bits[first // WORD]
            if two:
                half, (low, high) = i % 2, (x[0] for x, _ in vectors[i // 2 * 2 :][:2])
                word = w.permuted(low, high, w.LOWER)
            *words, behind = w.unpack(word, places[i], half, min(HALF, channels - first), two)
            places[i] = behind + ((word >> WORD - 1) & half) * 4
            each.append(words)
        yield first // 2, each


def whole(loaded, vectors: int):
    """Yield vectors that are not packed as `unpacked` does."""
    yield 0, list(itertools.batched(loaded, len(loaded) // vectors))


def multiplied(n: Vectors, pieces, query):
    """Multiply two vectors in `unpacked` pieces with queries: for each four heads, products of this lane's head with both."""
    words, pairs = n.channels // 2, n.terms // 2
    sums = [[t.float_number(0)] * 4 for _ in range(n.groups * pairs)]
    for first, both in pieces:
        for product, step in itertools.product(range(len(sums)), range(0, len(both[0]), 2)):
            left = [both[i][step + j] for j in (0, 1) for i in (0, 1)]
            sums[product] = w.multiply(sums[product], left, query[product * words + first + step :][:2], n.dtype)
    halves = [[x[2 * i] + x[2 * i + 1] for i in (0, 1)] for x in sums]
    return [
        [functools.reduce(operator.add, x) for x in zip(*halves[i : i + pairs], strict=True)]
        for i in range(0, len(sums), pairs)
    ]


def over_rows(x, combine):
    """Combine a float32 number with those of the seven other lanes that have the same head."""
    for distance in (4, 8, 16):
        x = combine(x, t.shuffle(x, distance))
    return x


def weighed(n: Vectors, pieces, query, seen, scale: float, maximum, total):
    """Weigh 16 keys for each head: the new maximum and total to base 2, what the sums so far are scaled by, and the weights.

    The maximum is that of all keys, the total of this lane's. The weights are the right operand of `added`.

    Args:
        n: sizes.
        pieces, query: see `multiplied`.
        seen: which of this lane's two keys hold a token.
        scale: of logits.
        maximum, total: as they are so far, of each four heads.
    """
    weights, decays, sums, low = [], [], [], t.float_number(-math.inf)
    for logits, highest, before in zip(multiplied(n, pieces, query), maximum, total, strict=True):
        logits = [held.select(x * (scale * LOG2_E), low) for x, held in zip(logits, seen, strict=True)]
        risen = over_rows(w.most(*logits), w.most).max(highest)
        shift = (risen > low).select(risen, t.float_number(0.0))
        decays.append((highest - shift).exp2(approx=True))
        weights.append([(x - shift).exp2(approx=True) for x in logits])
        sums.append((risen, before * decays[-1] + (weights[-1][0] + weights[-1][1])))
    both = [*weights, [t.float_number(0.0)] * 2][:2]
    right = [w.transposed(w.pair(x, y, n.dtype)) for x, y in zip(*both, strict=True)]
    maximum, total = zip(*sums, strict=True)
    return maximum, total, decays, right


def added(n: Vectors, pieces, right, decays, sums):
    """Add 16 values `in_columns`, weighed, to the sums of channels of each head: four for each two channels of a lane."""
    sums = [x * decays[i % 2 % n.groups] for i, x in enumerate(sums)]
    for first, four in pieces:
        for at, words in enumerate(zip(*four, strict=True)):
            mine = slice(4 * (first + at), 4 * (first + at) + 4)
            left = [w.permuted(*words[i : i + 2], halves) for i in (0, 2) for halves in (w.LOWER, w.UPPER)]
            sums[mine] = w.multiply(sums[mine], left, right, n.dtype)
    return sums
