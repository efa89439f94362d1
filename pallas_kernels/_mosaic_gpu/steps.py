"""The steps of `decode.attend` that Pallas has no operations for, as functions that are made for a kernel's sizes.

`copier` and `multiplier` are of one warp, which waits for no other; `merger` joins what all warps of a list have summed.
"""

import functools
import math
from typing import Any

import jax.numpy as jnp

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu import warps as w
from pallas_kernels._mosaic_gpu.attention_step import attend_step
from pallas_kernels._mosaic_gpu.pallas import arith, ir, mgpu, plgpu
from pallas_kernels._mosaic_gpu.sizes import ENTRIES, LINE, Lists, Sizes
from pallas_kernels.numerics import LOG2_E


def a_tile():
    """Return the type of the ring's tiles of keys or values."""
    return plgpu.RefType((plgpu.SwizzleTransform(LINE),))


def scalar(x):
    """Return the number of an array without axes."""
    return t.number(t.value(x))


def numbers(count, dtype):
    """Return the type of arrays that have ``count`` numbers for each thread."""
    return plgpu.ShapeDtypeStruct((t.THREADS * count,), dtype, layout=t.own(count))


def column(n: Sizes):
    """Return the first channel of a row that this lane has, see `attention_step`."""
    return t.signed(w.lane() % 4) * (2 if n.kind is None else 4)


def copier(n: Sizes, lists: Lists, position: bool):
    """Return functions that load what tells the rows of a step, copy these rows into the ring, and wait for them.

    Rows in tiles come otherwise, and their positions alone are copied.
    """
    loads = bool(lists.loads)

    def entry(start):
        return start + t.signed(w.thread() // w.LANES * ENTRIES + w.lane() % ENTRIES)

    def fetch(refs, scalars):
        """Load what tells the row of this lane's entry; nothing waits for it yet."""

        @plgpu.inline_mgpu(
            arg_types=((t.ref(),) * len(refs), (t.splat(),) * len(scalars)), return_type=numbers(lists.loads, jnp.int32)
        )
        def run(ctx, refs, scalars):
            start, *scalars = map(scalar, scalars)
            return t.made_of(lists.load(refs, scalars, entry(start)))

        return (run(refs, scalars),) if loads else ()

    def copy(stored, ring, loaded, scalars, base, stage):
        """Begin to copy the rows of a step and their positions, and write its biases."""
        types = tuple((t.ref(),) * len(x) for x in stored)

        @plgpu.inline_mgpu(
            arg_types=(types, t.ref(), (t.own(lists.loads),) * loads, (t.splat(),) * len(scalars), t.splat(), t.splat())
        )
        def run(ctx, stored, ring, loaded, scalars, base, stage):
            start, *scalars = map(scalar, scalars)
            loaded = t.numbers_of(loaded[0]) if loads else []
            row, place = lists.row(scalars, entry(start), loaded), n.place(ring, scalar(stage))
            first = t.element(scalar(base), n.slots, t.number(0))
            write_tags(stored, place, row, loaded, first)
            if not n.tiled:
                copy_rows(stored, place, row, lists.copy and lists.copy(scalars, row), scalar(base))
            w.end_step()

        run(stored, ring, loaded, scalars, base, stage)

    def copy_rows(stored, place, row, copy, base):
        chunks = n.width // 16  # of 16 bytes, which a lane copies at once
        at_once, chunk, lead = w.LANES // chunks, t.signed(w.lane() % chunks), t.signed(w.lane() // chunks)

        def source(ref, vector):
            """Return a function of a row to where this lane's chunk of it is; a row of the host may be a key and a value."""
            *_, rows, channels = t.shape(ref)
            many = channels // n.dim
            first = t.at(t.address(ref), t.element(base, rows, t.number(0)), many * n.width)
            first = t.at(first, chunk + min(vector, many - 1) * chunks, 16)
            return lambda row: t.at(first, row, many * n.width)

        near, far = ([source(x, i) for i, x in enumerate(refs)] for refs in (stored[0], stored[3] * 2))
        to = place + lead * n.pitch + chunk * 16
        for step in range(0, ENTRIES, at_once):
            taken, copied = (x if x is None else w.lane_value(x, lead + step) for x in (row, copy))
            for i, at in enumerate(near):
                where = at(taken)
                if t.shape(stored[0][i])[-2] < n.slots:
                    where = arith.select(t.value(copied >= 0), at(copied), far[i](taken))
                w.copy_async(to, where, 16, taken >= 0, (i * ENTRIES + step) * n.pitch)

    def write_tags(stored, place, row, loaded, first):
        """Write what is not negative for an entry that holds a token: its position, or without positions its row."""
        tag, mine = place + t.signed(w.lane()) * 4, w.lane() < ENTRIES
        if position:
            source = t.at(t.at(t.address(stored[1][0]), first, 4), row, 4)
            w.copy_async(tag, source, 4, mine & (row >= 0), n.tags)
        w.store_shared(tag, [row], mine & (row < 0) if position else mine, n.tags)
        if lists.turned:
            w.store_shared(tag, loaded[-1:], mine, n.biases)
        if lists.biased:
            bias = t.number(arith.bitcast(w.f32(), t.value(loaded[-1])), None) * LOG2_E
            w.store_shared(tag, [bias], mine, n.biases)
        halves = t.number(0)
        for i, scale in enumerate(stored[2]):
            word, second = w.word_of(t.at(t.at(t.address(scale), first, 2), row, 2))
            w.copy_async(tag, word, 4, mine & (row >= 0), n.scales + 4 * ENTRIES * i)
            halves = halves + second.select(t.number(1 << i), t.number(0))
        if stored[2]:
            w.store_shared(tag, [halves], mine, n.scales + 8 * ENTRIES)

    @plgpu.inline_mgpu()
    def arrive(ctx):
        """Wait until the oldest step has arrived, and no lane reads the one before it."""
        w.wait_for_step(n.stages - 2)

    return fetch, copy, arrive


def multiplier(n: Sizes, scale: float, biased: bool):
    """Return functions that load the query, positions of its rows and frequencies, that begin, and that attend to a step.

    Arrays between them are those that `attention_step.attend_step` lists.
    """
    tiles = n.dim // 8
    counts = n.halves * 2 * tiles, n.halves, n.halves  # sums, maximum, total

    def rows():
        return [t.signed(w.lane() // 4) + 8 * half for half in range(n.halves)]

    @plgpu.inline_mgpu(arg_types=(t.ref(), t.splat()), return_type=numbers(n.halves * tiles, jnp.int32))
    def query(ctx, source, base):
        source, base = t.address(source), scalar(base) * n.group
        places = [t.at(source, t.element(base + t.least(x, n.group - 1), n.dim, column(n)), 2) for x in rows()]
        first = [8 * i if n.kind is None else 16 * (i // 2) + 2 * (i % 2) for i in range(tiles)]
        return t.made_of([t.load_int(t.at(x, t.number(i), 2)) for x in places for i in first])

    @plgpu.inline_mgpu(arg_types=(t.ref(), t.splat()), return_type=numbers(n.halves, jnp.int32))
    def asked(ctx, source, row):
        source, row = t.address(source), scalar(row) * n.queries
        return t.made_of([t.load_int(t.at(source, row + divmod_unsigned(x + n.first, n.queries)[1], 4)) for x in rows()])

    @plgpu.inline_mgpu(arg_types=(t.ref(),), return_type=numbers(n.dim // 8, jnp.float32))
    def frequencies(ctx, source):
        place, f32 = t.at(t.address(source), column(n), 4), jnp.dtype(jnp.float32)
        return t.made_of([x for i in range(0, n.dim // 2, 8) for x in t.load_some(t.at(place, t.number(i), 4), f32, 2)], True)

    def begin():
        starts = zip(counts, (0.0, -math.inf, 0.0), strict=True)
        return tuple(plgpu.layout_cast(jnp.full((t.THREADS * x,), y, jnp.float32), t.own(x)) for x, y in starts)

    def places(refs, stage):
        """List where keys, values and tags are of this warp's entries of a stage."""
        ring, *tiles = refs
        place = n.place(ring, stage)
        if not tiles:
            return place, place + ENTRIES * n.pitch, place + n.tags
        first = (stage * (n.lines * n.block) + w.warp() * ENTRIES) * LINE
        return *(t.number(t.address(x)) + first for x in tiles), place

    def keeper(logits, base, start):
        """Return a function that stores logits of this lane."""
        column, address = start + w.warp() * ENTRIES + t.signed(w.lane() % 4) * 2, t.address(logits)

        def keep(half, found):
            row = t.signed(w.lane() // 4) + 8 * half
            for i, x in enumerate(found):
                slot = column + (8 * (i // 2) + i % 2)
                place = t.at(address, t.element(base * n.group + row, n.slots, slot), 4)
                t.ptx("st.global.f32 [$0], $1;", place, x, where=(row < n.group) & (slot < n.slots))

        return keep

    def add(refs, query, asked, inv_freq, state, stage, logits, where):
        types = (t.ref(), *(a_tile(),) * (len(refs) - 1))
        given = (t.own(n.halves),) * len(asked), (t.own(n.dim // 8),) * len(inv_freq)
        own = (t.own(n.halves * tiles), *given, tuple(map(t.own, counts)))
        more = (t.ref(),) * len(logits), (t.splat(),) * len(where)

        @plgpu.inline_mgpu(
            arg_types=(types, *own, t.splat(), *more), return_type=tuple(numbers(x, jnp.float32) for x in counts)
        )
        def run(ctx, refs, query, asked, inv_freq, state, stage, logits, where):
            given = t.numbers_of(asked[0]) if asked else None, t.numbers_of(inv_freq[0], floats=True) if inv_freq else None
            before = [t.numbers_of(x, floats=True) for x in state]
            keep = keeper(logits[0], *map(scalar, where)) if logits else None
            after = attend_step(n, scale, biased, places(refs, scalar(stage)), t.numbers_of(query), *given, keep, *before)
            return tuple(t.made_of(x, floats=True) for x in after)

        return run(refs, query, asked, inv_freq, state, stage, logits, where)

    return query, asked, frequencies, begin, add


def merger(n: Sizes, out_dtype: Any, beside: int, beside_dtype: Any, joining: bool = False):
    """Return functions that put a warp's sums into its room, and that merge those of all warps of a cluster.

    ``beside`` parts in global memory enter the same sums; of several clusters of a list, in the first. ``joining``: there is
    nothing else.
    """
    whole, room = n.group * n.dim, a_tile() if n.tiled else t.ref()
    several, threads = n.splits > 1 and not joining, t.THREADS * (1 if joining else n.warpgroups + n.tiled)
    edges, joined_edges = 4 * whole, 4 * whole + 8 * n.group  # where maxima and denominators lie

    @plgpu.inline_mgpu(arg_types=(room, *(t.own(n.halves * x) for x in (n.dim // 4, 1, 1))))
    def publish(ctx, ring, sums, maximum, total):
        place, sums_at = t.number(t.address(ring)) + w.warp() * n.room, column(n)
        sums, maximum, total = (t.numbers_of(x, floats=True) for x in (sums, maximum, total))
        w.meet_warp()
        for half in range(n.halves):
            row = t.signed(w.lane() // 4) + 8 * half
            to, mine = place + (row * n.dim + sums_at) * 4, row < n.group
            of_half = sums[half * n.dim // 4 : (half + 1) * n.dim // 4]
            if n.kind is None:
                for i in range(n.dim // 8):
                    w.store_shared(to, of_half[2 * i : 2 * i + 2], mine, 32 * i)
            else:
                for i in range(n.dim // 16):  # even channels, then odd ones
                    four = of_half[4 * i : 4 * i + 4]
                    w.store_shared(to, [four[0], four[2], four[1], four[3]], mine, 64 * i)
            denominator = w.over_quad(total[half], lambda x, y: x + y)
            w.store_shared(place + row * 8, [maximum[half], denominator], mine & (sums_at < 1), edges)

    def published(places, row, at, edges, far):
        """List maximum, denominator and four sums of what lies at each place, of this block or of another one."""
        for place in places:
            edge = w.load_shared(place + row * 8, (w.f32(),) * 2, edges, far)
            yield edge + w.load_shared(place + at * 4, (w.f32(),) * 4, far=far)

    def stored(refs, row, at, base, cluster):
        """List the same of each part in global memory."""
        zero = t.float_number(0.0)
        for part in range(beside):
            where = base * (beside * n.group) + row + part * n.group
            lse = t.load_float(t.at(t.address(refs[1]), where, 4), "float32")
            some, index = (lse > -math.inf) & (cluster < 1), [t.element(where, n.dim, at % n.dim + i) for i in range(4)]
            places = [t.at(t.address(refs[0]), x, jnp.dtype(beside_dtype).itemsize) for x in index]
            four = [some.select(t.load_float(x, beside_dtype), zero) for x in places]
            yield [some.select(lse * LOG2_E, t.float_number(-math.inf)), some.select(t.float_number(1.0), zero), *four]

    def quarters(first, count):
        """List for this thread where each of its groups of four numbers of the output begins, its row, and whether it is."""
        for step in range(-(-count // threads)):
            index = t.signed(w.thread()) + step * threads
            mine = (index < count) & (first + index < whole // 4)
            at = t.least(first + index, whole // 4 - 1) * 4
            yield at, divmod_unsigned(at, n.dim)[0], mine

    @plgpu.inline_mgpu(
        arg_types=((room,) * (not joining), t.ref(), t.ref(), (t.ref(),) * (2 * bool(beside)), (t.splat(),) * 3)
    )
    def merge(ctx, ring, out, lse, refs, where):
        base, cluster, split = map(scalar, where)
        first, count, offset, places = t.number(0), whole // 4, edges, []
        if not joining:
            own = t.number(t.address(ring[0]))
            places = [own + i * n.room for i in range(n.warps)]
        if several:
            for at, row, mine in quarters(first, count):
                top, total, four = joined(published(places, row, at, edges, far=False))
                w.store_shared(own + at * 4, four, mine)
                w.store_shared(own + row * 8, [top, total], mine, joined_edges)
            t.meet_cluster()
            count, offset = -(-count // n.splits), joined_edges
            first = split * count
            places = [w.far_address(own, peer) for peer in range(n.splits)]
        for at, row, mine in quarters(first, count):
            found = [*published(places, row, at, offset, several), *stored(refs, row, at, base, cluster)]
            top, total, four = joined(found)
            divisor, to = (total > 0.0).select(total, t.float_number(1.0)), base * n.clusters + cluster
            store_four(t.address(out), t.element(to, whole, at), [x / divisor for x in four], out_dtype, mine)
            log = ((top > -math.inf).select(top, t.float_number(0.0)) + total.log2(approx=True)) * (1 / LOG2_E)
            begins = divmod_unsigned(at, n.dim)[1] < 1
            t.ptx("st.global.f32 [$0], $1;", t.at(t.address(lse), to * n.group + row, 4), log, where=mine & begins)
        if several:
            t.meet_cluster()  # before the memory that others read is given back

    return publish, merge


def meet_block():
    """Wait for all threads of the program."""
    plgpu.inline_mgpu()(lambda ctx: w.meet_block())()


def joined(found):
    """Join parts of a softmax, each its maximum to base 2, its denominator and sums, to one."""
    found = list(found)
    top = functools.reduce(w.most, [x for x, *_ in found])
    shift = (top > -math.inf).select(top, t.float_number(0.0))
    shares = [(x - shift).exp2(approx=True) for x, *_ in found]
    scaled = [[share * x for x in part[1:]] for share, part in zip(shares, found, strict=True)]
    total, *sums = (functools.reduce(lambda x, y: x + y, same) for same in zip(*scaled, strict=True))
    return top, total, sums


def divmod_unsigned(x, divisor):
    """Return quotient and remainder of a number that is not negative, with signs."""
    x = t.number(t.value(x), signed=False)
    return t.signed(x // divisor), t.signed(x % divisor)


def store_four(base, index, numbers, dtype, where):
    """Store four float32 numbers in a global array of ``dtype``."""
    place = t.at(base, index, jnp.dtype(dtype).itemsize)
    if dtype == jnp.float32:
        t.ptx("st.global.v4.f32 [$0], {$1, $2, $3, $4};", place, *numbers, where=where)
        return
    kind, half = mgpu.utils.dtype_to_ir_type(dtype), ir.IntegerType.get_signless(16)
    numbers = [arith.bitcast(half, arith.truncf(kind, t.value(x))) for x in numbers]
    t.ptx("st.global.v4.b16 [$0], {$1, $2, $3, $4};", place, *numbers, where=where)
