"""Rows that a team shares, the warpgroups of a program or of all programs of a cluster: sums, running counts, histograms.

Member m of a team has the entries ``m * share`` to ``(m + 1) * share - 1`` of a row, as an array in its registers (`arrays`).
"""

import dataclasses
import functools
import itertools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu import warps as w
from pallas_kernels._mosaic_gpu.pallas import plgpu

SUMS = 10  # places for `Team.joined` and `Team.together`
BINS = 1024  # of a histogram
HALF = 2**16 - 1
FOLDS = {"add": operator.add, "min": lambda x, y: (x < y).select(x, y), "max": lambda x, y: (x < y).select(y, x)}


@dataclasses.dataclass(frozen=True)
class Team:
    """Who shares a row.

    Attributes:
        groups: warpgroups of a program, at most 8.
        parts: programs of the cluster.
        share: entries of a warpgroup, a multiple of 128.
    """

    groups: int
    parts: int
    share: int

    @property
    def each(self) -> int:
        """Entries of a thread."""
        return self.share // t.THREADS

    @property
    def members(self) -> int:
        """Warpgroups of all programs."""
        return self.groups * self.parts

    @property
    def scratch(self) -> list[Any]:
        """Shared memory: of sums, and of two histograms, which take turns."""
        return [plgpu.SMEM((x,), jnp.int32) for x in ((SUMS + 1) * w.LANES, 2 * BINS)]

    def group(self) -> jax.Array:
        """Return which warpgroup of its program this is."""
        return lax.axis_index("group") if self.groups > 1 else jnp.int32(0)

    def part(self) -> jax.Array:
        """Return which program of the cluster this is."""
        return lax.axis_index("part") if self.parts > 1 else jnp.int32(0)

    def member(self) -> jax.Array:
        """Return which member of the team this warpgroup is."""
        return self.part() * self.groups + self.group()

    def entries(self) -> jax.Array:
        """Return which entries of a row this warpgroup has."""
        return self.member() * self.share + order(self.share)

    def load(self, ref, line: jax.Array, other: float = 0) -> jax.Array:
        """Load this warpgroup's entries of a line of [N, S]: float32, int32, or truth values, as int32; behind S ``other``.

        Neighbouring threads load neighbouring words, four each where S and the share allow it.
        """
        dtype, last, chunk = jnp.dtype(ref.dtype), ref.shape[1], math.gcd(self.each, 4)
        floats, pack = jnp.issubdtype(dtype, jnp.floating), 4 if chunk == 4 and last % 4 == 0 else 1

        @plgpu.inline_mgpu(arg_types=(t.ref(), t.splat(), t.splat()), return_type=_type(self.each, floats))
        def run(ctx, ref, line, begin):
            row = t.at(t.address(ref), t.element(t.number(t.value(line)), last, t.number(0)), dtype.itemsize)
            warp, lane, found = t.signed(t.thread() // w.LANES), t.signed(w.lane()), []
            first = t.number(t.value(begin)) + warp * (w.LANES * self.each) + lane * chunk
            for number in range(0, self.each, pack):
                at = first + (number // chunk * (w.LANES * chunk) + number % chunk)
                place, inside = t.at(row, at, dtype.itemsize), at < last
                if pack > dtype.itemsize:
                    word = t.load_at(place, jnp.int32, inside, 0)
                    found += [(word >> (8 * i)) & 1 for i in range(pack)]
                else:
                    found += t.load_pack(place, dtype, pack, inside, other)
            return t.made_of(found, floats)

        return run(ref, line, self.member() * self.share)

    def joined(self, sums: list[tuple[jax.Array, str]], scratch, first: int = 0) -> list[jax.Array]:
        """Fold arrays of all warpgroups of the program; each has its word "add", "min" or "max".

        Places of ``scratch`` are used from ``first`` on; the next call or `before` has to use others.
        """
        floats = [jnp.issubdtype(x.dtype, jnp.floating) for x, _ in sums]
        layouts = tuple(t.own(x.shape[0] // t.THREADS) for x, _ in sums)

        @plgpu.inline_mgpu(arg_types=(t.ref(), layouts), return_type=tuple(_one(x) for x in floats))
        def run(ctx, scratch, columns):
            base, lane, mine = t.number(t.address(scratch)), t.signed(w.lane()), []
            for x, (_, fold), is_float in zip(columns, sums, floats, strict=True):
                mine.append(over_lanes(functools.reduce(FOLDS[fold], t.numbers_of(x, is_float)), fold))
            for i, x in enumerate(mine, first):
                t.ptx("st.shared.b32 [$0], $1;", base + w.warp() * 4 + 4 * w.LANES * i, x, where=lane < 1)
            w.meet_block()
            warps, found = 4 * self.groups, []
            for i, ((_, fold), is_float) in enumerate(zip(sums, floats, strict=True), first):
                place = base + t.least(lane, warps - 1) * 4 + 4 * w.LANES * i
                x = t.load_shared_float(place) if is_float else t.load_shared(place)
                if fold == "add":
                    x = (lane < warps).select(x, t.float_number(0) if is_float else t.number(0))
                found.append(over_lanes(x, fold))
            return tuple(found)

        return list(run(scratch, tuple(x for x, _ in sums)))

    def together(self, numbers: list[jax.Array], folds: list[tuple[int, str, bool]], scratch, first: int) -> list[jax.Array]:
        """Fold up to four int32 numbers of each program of the cluster, which are the same in all of its threads.

        Args:
            numbers: this program's.
            folds: for each result which number it folds; "min", "max", or "low" or "high", the sum of the lower or upper
                halves of words; and whether only programs before this one count, in a sum.
            scratch: as for `joined`.
            first: a place of ``scratch`` that nothing else uses.
        """
        pieces = {"min": lambda x: x, "max": lambda x: x, "low": lambda x: x & HALF, "high": lambda x: x >> 16}
        if self.parts == 1:
            return [jnp.int32(0) if earlier else pieces[fold](numbers[at]) for at, fold, earlier in folds]

        @plgpu.inline_mgpu(arg_types=(t.ref(), (t.splat(),) * len(numbers)), return_type=(_one(),) * len(folds))
        def run(ctx, scratch, numbers):
            place, lane = t.number(t.address(scratch)) + 4 * w.LANES * first, t.signed(w.lane())
            for at, x in enumerate(numbers):
                t.ptx("st.shared.b32 [$0], $1;", place + 4 * at, t.number(t.value(x)), where=t.signed(w.thread()) < 1)
            t.meet_cluster()
            peer, at, results = lane >> 2, lane & 3, []
            far = w.far_address(place, t.least(peer, self.parts - 1)) + at * 4
            found = t.number(t.ptx("ld.shared::cluster.b32 $0, [$1];", far, result=t.i32()))
            for which, fold, earlier in folds:
                last = t.special("cluster_ctarank") if earlier else t.number(self.parts)
                kind, none = {"min": ("min", 2**31 - 1), "max": ("max", -(2**31))}.get(fold, ("add", 0))
                counts = (at < which + 1) & (at > which - 1) & (peer < last)
                results.append(w.redux(counts.select(pieces[fold](found), t.number(none)), kind))
            return tuple(results)

        return list(run(scratch, tuple(numbers)))

    def before(self, words: jax.Array, scratch, small: bool = True) -> tuple[jax.Array, jax.Array]:
        """Sum up the numbers int32 [N] of the program before each of them, in the order of `order`, and all of them.

        If they are ``small``, they are truth values in bits 0 and 16, of which a program has less than 2**15. Between two
        calls there has to be `joined` or `meet`.
        """
        each, together, halves = words.shape[0] // t.THREADS, *((2, 0xFF00FF) if small else (1, -1))

        @plgpu.inline_mgpu(arg_types=(t.ref(), t.own(each)), return_type=(_type(each), _one()))
        def run(ctx, scratch, words):
            base, lane, warp = t.number(t.address(scratch)), t.signed(w.lane()), w.warp()
            chunks, found, total = list(itertools.batched(t.numbers_of(words), math.gcd(each, 4))), [], t.number(0)
            for some in itertools.batched(chunks, together):  # a warp's sums of two chunks fit into the bytes of a word
                word = functools.reduce(
                    operator.add, [functools.reduce(operator.add, x) << (8 * i) for i, x in enumerate(some)]
                )
                upto = word
                for step in (1, 2, 4, 8, 16):
                    upto = upto + (lane < step).select(t.number(0), t.shuffle_up(upto, step))
                behind, whole = upto - word, w.lane_value(upto, t.number(w.LANES - 1))
                for i, chunk in enumerate(some):
                    first = total + ((behind >> (8 * i)) & halves)
                    found += itertools.accumulate(chunk[:-1], operator.add, initial=first)
                    total = total + ((whole >> (8 * i)) & halves)
            place = base + 4 * w.LANES * SUMS
            t.ptx("st.shared.b32 [$0], $1;", place + warp * 4, total, where=lane < 1)
            w.meet_block()
            warps = t.load_shared(place + t.least(lane, 4 * self.groups - 1) * 4)
            earlier = w.redux((lane < warp).select(warps, t.number(0)), "add")
            whole = w.redux((lane < 4 * self.groups).select(warps, t.number(0)), "add")
            return t.made_of([x + earlier for x in found]), whole

        return run(scratch, words)

    def meet(self) -> None:
        """Wait for all threads of the team; what they wrote in their own shared memory may be read then."""
        plgpu.inline_mgpu()(lambda ctx: w.meet_block() if self.parts == 1 else t.meet_cluster())()

    def end(self) -> None:
        """Wait until all programs of the cluster have read what they need."""
        if self.parts > 1:
            plgpu.inline_mgpu()(lambda ctx: t.meet_cluster())()

    @staticmethod
    def folded(x: jax.Array, each: int, fold: str) -> jax.Array:
        """Fold a thread's entries i, i + ``each``, i + 2 * ``each``, ... by "add", "min" or "max": [128 * each]."""
        floats = jnp.issubdtype(x.dtype, jnp.floating)

        @plgpu.inline_mgpu(arg_types=(t.own(x.shape[0] // t.THREADS),), return_type=_type(each, floats))
        def run(ctx, x):
            numbers = t.numbers_of(x, floats)
            return t.made_of([functools.reduce(FOLDS[fold], numbers[i::each]) for i in range(each)], floats)

        return run(x)

    def clear(self, bins) -> None:
        """Set both histograms to zero; `joined` or `before` has to follow before they count."""

        @plgpu.inline_mgpu(arg_types=(t.ref(), t.splat()))
        def run(ctx, bins, group):
            place = t.number(t.address(bins)) + (t.number(t.value(group)) * t.THREADS + t.signed(t.thread())) * 4
            for at in range(0, 2 * BINS, t.THREADS * self.groups):
                t.ptx("st.shared.b32 [$0], $1;", place + at * 4, t.number(0))

        run(bins, self.group())

    def tally(self, bins, first: jax.Array, key: jax.Array, low: jax.Array, high: jax.Array, shift: jax.Array) -> None:
        """Count the keys of this warpgroup from ``low`` to ``high`` - 1, each at ``first`` + (key - low) >> shift."""

        @plgpu.inline_mgpu(arg_types=(t.ref(), t.own(key.shape[0] // t.THREADS), *(t.splat(),) * 4))
        def run(ctx, bins, key, *numbers):
            first, low, high, shift = (t.number(t.value(x)) for x in numbers)
            text = "{ .reg .pred p; .reg .b32 d; sub.s32 d, $1, $2; setp.lt.u32 p, d, $3; shr.u32 d, d, $4; shl.b32 d, d, 2;"
            text += " add.s32 d, d, $0; @p red.shared.add.u32 [d], 1; }"
            for x in t.numbers_of(key):
                t.ptx(text, t.number(t.address(bins)) + first * 4, x, low, high - low, shift)

        run(bins, key, first, low, high, shift)

    def counts(self, bins, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return how many keys of all programs are in some of the bins, the last ones first, and which bins these are.

        Each warpgroup of a program gets its share of the bins. The other histogram is cleared.
        """
        each = BINS // (self.groups * t.THREADS)
        number = BINS - 1 - (self.group() * (each * t.THREADS) + order(each * t.THREADS))

        @plgpu.inline_mgpu(arg_types=(t.ref(), t.splat(), t.own(each)), return_type=_type(each))
        def run(ctx, bins, first, number):
            base, first, places = t.number(t.address(bins)), t.number(t.value(first)), t.numbers_of(number)
            here, other, found = base + first * 4, base + (t.number(BINS) - first) * 4, []
            homes = [here] if self.parts == 1 else [w.far_address(here, peer) for peer in range(self.parts)]
            text = f"ld.shared{'::cluster' * (self.parts > 1)}.b32 $0, [$1];"
            for place in places:
                found.append(
                    functools.reduce(operator.add, [t.number(t.ptx(text, x + place * 4, result=t.i32())) for x in homes])
                )
            for place in places:
                t.ptx("st.shared.b32 [$0], $1;", other + place * 4, t.number(0))
            return t.made_of(found)

        return run(bins, first, number), number


def order(size: int) -> jax.Array:
    """Return 0 to ``size`` - 1 in the order in which the threads of a warpgroup have them."""
    each, chunk = size // t.THREADS, math.gcd(size // t.THREADS, 4)

    @plgpu.inline_mgpu(return_type=_type(each))
    def run(ctx):
        first = t.signed(t.thread() // w.LANES) * (w.LANES * each) + t.signed(w.lane()) * chunk
        return t.made_of([first + (i // chunk * (w.LANES * chunk) + i % chunk) for i in range(each)])

    return run()


def over_lanes(x, fold):
    """Fold a number over the lanes of a warp."""
    if x.is_signed is None:
        for distance in (1, 2, 4, 8, 16):
            x = FOLDS[fold](x, t.shuffle(x, distance))
        return x
    return w.redux(x, fold)


def _type(each, floats=False):
    return plgpu.ShapeDtypeStruct((each * t.THREADS,), jnp.float32 if floats else jnp.int32, layout=t.own(each))


def _one(floats=False):
    return plgpu.ShapeDtypeStruct((), jnp.float32 if floats else jnp.int32, layout=t.splat())
