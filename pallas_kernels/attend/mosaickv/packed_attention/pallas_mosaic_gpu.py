"""Decode attention over packed blocks through Mosaic GPU; the last program of a list attends to its buffer of raw tokens too.

Programs share all lists of blocks evenly, or each has a part of one list. In each list of its share a program goes through
the segments and writes one partial for each, in its basis: the list's program j writes that of segment s to row ``j + s``.
Each of its warps takes 16 tokens at a time, see `packed`, and keeps its sums in registers until a segment ends. A second
kernel adds up the partials of each segment, and turns the sums into the model's basis.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays, assembly
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu import warps as w
from pallas_kernels._mosaic_gpu.packed import (
    SIZES,
    VECTORS,
    Vectors,
    added,
    eighth,
    for_each_list,
    in_columns,
    in_rows,
    load_queries,
    load_vectors,
    load_whole,
    of_columns,
    over_rows,
    placed,
    quad,
    shares_of,
    unpacked,
    warp,
    weighed,
    whole,
)
from pallas_kernels._mosaic_gpu.pallas import pl, plgpu
from pallas_kernels._mosaic_gpu.steps import numbers
from pallas_kernels.machine import current_machine
from pallas_kernels.numerics import LOG2_E, finite_or_zero

WARPS = t.THREADS // w.LANES
TOKENS = WARPS * VECTORS  # of a step of a program
TERMS = 2  # of a query that meet keys: they have twice the bits that weights keep
PROGRAMS, GROUPS = 132, 4  # blocks that run on an H200 at once, and programs of each
JOINED = 32  # partials, or rows of a basis, that a thread reads together
LEAST = 128  # programs that should join
BUFFER = 4  # steps in the time in which a program attends to a buffer
AHEAD = 16 << 20  # bytes of bases that the level-2 cache keeps until they are read
TAKES = SIZES


def step_functions(n: Vectors, scale: float, packed: bool):
    """Return functions that load keys or values of a step of a warp, that begin, weigh, add, and store a warp's sums.

    Sums are those of channels, of all tokens of the warp; maximum and total of each head's weights are to base 2, the total
    of this lane's tokens.
    """
    loaded, tiles = 2 * (4 * n.loads + n.bits) if packed else n.channels, n.channels // 4
    counts = 4 * tiles, n.groups, n.groups  # sums, maximum, total
    shares = n.groups * n.terms // 2 * (n.channels // 2)

    def loader(columns):
        @plgpu.inline_mgpu(arg_types=((t.ref(),) * (1 + packed), t.own(2)), return_type=numbers(loaded, jnp.int32))
        def load(ctx, refs, rows):
            rows, share = t.numbers_of(rows), n.channels // 2
            if packed:
                return t.made_of(load_vectors(n, *refs, rows, [x >= 0 for x in rows]))
            where = (of_columns(rows), eighth() * share, share) if columns else (rows, quad() * n.channels, n.channels)
            return t.made_of(load_whole(n, *refs, *where))

        return load

    def pieces(shared, given, columns):
        if not packed:
            return whole(t.numbers_of(given), 4 if columns else 2)
        place = t.number(t.address(shared)) + warp() * n.room
        return unpacked(n, placed(n, t.numbers_of(given), place, in_columns if columns else in_rows))

    def begin():
        starts = zip(counts, (0.0, -math.inf, 0.0), strict=True)
        return tuple(arrays.spread(y, t.THREADS * x, jnp.float32) for x, y in starts)

    types = t.ref(), t.own(loaded)

    @plgpu.inline_mgpu(
        arg_types=(*types, t.own(shares), t.own(2), *(t.own(n.groups),) * 2),
        return_type=(*(numbers(n.groups, jnp.float32),) * 3, numbers(2, jnp.int32)),
    )
    def weigh(ctx, shared, key, query, rows, maximum, total):
        seen, state = [x >= 0 for x in t.numbers_of(rows)], (t.numbers_of(x, True) for x in (maximum, total))
        maximum, total, decays, right = weighed(n, pieces(shared, key, False), t.numbers_of(query), seen, scale, *state)
        return *(t.made_of(x, floats=True) for x in (maximum, total, decays)), t.made_of(right)

    @plgpu.inline_mgpu(
        arg_types=(*types, t.own(2), t.own(n.groups), t.own(counts[0])), return_type=numbers(counts[0], jnp.float32)
    )
    def add(ctx, shared, value, right, decays, sums):
        sums, decays = t.numbers_of(sums, floats=True), t.numbers_of(decays, floats=True)
        return t.made_of(added(n, pieces(shared, value, True), t.numbers_of(right), decays, sums), floats=True)

    @plgpu.inline_mgpu(arg_types=(t.ref(), t.ref(), tuple(map(t.own, counts))))
    def publish(ctx, shared, edges, state):
        sums, maximum, total = (t.numbers_of(x, floats=True) for x in state)
        place, lane = t.number(t.address(shared)) + warp() * (4 * n.group * n.dim), t.signed(w.lane())
        column = lane >> 2
        for group in range(n.groups):
            head = quad() + 4 * group
            edge = t.number(t.address(edges)) + (warp() * n.group + head) * 8
            w.store_shared(
                edge, [maximum[group], over_rows(total[group], lambda x, y: x + y)], (column < 1) & (head < n.group)
            )
            for i in range(2 * tiles):  # rows of the products
                channel = column * (n.dim // 8) + i
                x = sums[4 * (i // 2) + 2 * (i % 2) + group]
                w.store_shared(place + (head * n.dim + channel) * 4, [x], head < n.group)

    return loader(False), loader(True), begin, weigh, add, publish


def _attend(functions, keys, values, query, rows_of, used, shared, edges, ahead):
    """Attend to the rows of all steps, and leave sums and ends of each warp in shared memory.

    With ``ahead`` keys, values and rows are loaded a step before; without, in fewer registers.
    """
    load_keys, load_values, begin, weigh, add, publish = functions

    def follow(step, carry):
        rows, now, later, (sums, maximum, total) = carry
        key, value = now or (load_keys(keys, rows), None)
        if ahead:
            now, after = (load_keys(keys, later), load_values(values, later)), rows_of(step + 2)
        maximum, total, decays, right = weigh(shared, key, query, rows, maximum, total)
        if not ahead:
            value, later, after = load_values(values, rows), rows_of(step + 1), None
        return later, now, after, (add(shared, value, right, decays, sums), maximum, total)

    rows = rows_of(0)
    first = ((load_keys(keys, rows), load_values(values, rows)), rows_of(1)) if ahead else (None, None)
    *_, state = lax.fori_loop(0, used, follow, (rows, *first, begin()))
    arrays.meet()
    publish(shared, edges, state)
    arrays.meet()


def _write(n, refs, shared, edges, at, segment):
    """Merge what the warps have left (`_attend`), and write it as partial ``at``."""
    out_ref, lse_ref, segment_ref = refs
    channel = arrays.counted(arrays.size_of(n.dim))
    held = jnp.minimum(channel, n.dim - 1)
    for g in range(n.group):
        ends = [
            [arrays.load_shared(edges, arrays.spread(2 * (i * n.group + g) + k, channel.shape[0])) for i in range(WARPS)]
            for k in (0, 1)
        ]
        shift = finite_or_zero(functools.reduce(jnp.maximum, ends[0]))
        shares = [jnp.exp2(x - shift) for x in ends[0]]
        total = sum(x * y for x, y in zip(shares, ends[1], strict=True))
        parts = [arrays.load_shared(shared, (i * n.group + g) * n.dim + held) for i in range(WARPS)]
        merged = sum(x * y for x, y in zip(shares, parts, strict=True)) / jnp.where(total > 0, total, 1.0)
        arrays.store(out_ref, jnp.where(channel < n.dim, (at * n.group + g) * n.dim + channel, -1), merged)
        arrays.store(lse_ref, jnp.where(channel < 1, at * n.group + g, -1), (shift + jnp.log2(total)) / LOG2_E)
    arrays.put(segment_ref, at, segment)
    arrays.meet()


def _body(
    parts_ref, key_ref, key_words_ref, value_ref, value_words_ref, blocks_ref, count_ref, last_ref, query_ref, *refs,
    n, heads, slots, segments, granule, span, scale, steps, size, splits, groups,
):  # fmt: skip
    # parts [L * M * G * N, D]; keys and values [L * S, r], their words [L * S, W]; blocks [L, K]; count [L]; last [B]; query
    # [L * G, D], bases [L, M * D * D], raw key and value [L * R, D], position [L, R]; owner [B, P] if given; then out
    # [L, X, G, D], lse [L, X, G], segment [L, X]. In shared memory the vectors of each warp, and then its sums; and maximum
    # and total of each.
    basis_ref, raw_key_ref, raw_value_ref, position_ref, *owner_ref, out_ref, lse_ref, segment_ref, shared, edges = refs
    written = out_ref, lse_ref, segment_ref
    group, listed, lists = lax.axis_index("group"), blocks_ref.shape[1], blocks_ref.shape[0]
    number, partials = lax.axis_index("x") * groups + group, segment_ref.shape[1]
    low, shared, edges = number * steps, shared.at[group], edges.at[group]
    # Two tokens of each thread: its lane's rows of a step.
    index = arrays.counted(2 * t.THREADS)
    thread, second = index & (t.THREADS - 1), lax.shift_right_logical(index, 7)
    row = lax.shift_right_logical(thread, 5) * VECTORS + lax.div(thread & (w.LANES - 1), 4) + second * (VECTORS // 2)

    def of_list(line, carry):
        begin, end = jnp.maximum(low - line * size, 0), jnp.minimum(low + steps - line * size, size)
        b, count, j = lax.div(line, heads), arrays.scalar(count_ref, line), number - lax.div(line * size, steps)
        first, behind = (lax.div(x * TOKENS, granule) for x in (begin, end))
        stop, last = jnp.minimum(behind, count), arrays.scalar(last_ref, b)

        def owner_of(block, load):
            if not owner_ref:
                return jnp.minimum(lax.div(block, span), last)
            return load(owner_ref[0], b * owner_ref[0].shape[1] + jnp.clip(block, 0, owner_ref[0].shape[1] - 1))

        def owner_at(entry):  # behind the list this is the last segment, so that the last rows get written too
            block = arrays.scalar(blocks_ref, line * listed + jnp.minimum(entry, listed - 1))
            return jnp.where(entry < count, owner_of(jnp.where(entry < count, block, 0), arrays.scalar), segments - 1)

        def of_segment(s, carry):
            real = jnp.minimum(s, segments - 1)

            def rows_of(step):
                """Return the rows of a step's tokens, -1 for those of other segments and behind the list."""
                token = step * TOKENS + row
                entry = first + lax.div(token, granule)
                block = arrays.load(blocks_ref, jnp.where(entry < stop, line * listed + entry, -1))
                mine = (entry < stop) & (owner_of(block, arrays.load) == s)
                return jnp.where(mine, line * slots + block * granule + lax.rem(token, granule), -1)

            query = load_queries(n, parts_ref, (line * segments + real) * (n.group * n.stored))
            used = lax.div(jnp.where(s < segments, stop - first, 0) * granule + (TOKENS - 1), TOKENS)
            used = jnp.clip(used, 0, -(-listed * granule // TOKENS))
            stored = (key_ref, key_words_ref), (value_ref, value_words_ref)
            _attend(step_functions(n, scale, packed=True), *stored, query, rows_of, used, shared, edges, ahead=True)
            _write(n, written, shared, edges, line * partials + j + s, real)
            return carry

        # Two neighbours may share a segment, but they write it to different rows. The last one writes all rows that are left.
        least = jnp.where(j == 0, 0, owner_at(first))
        most = jnp.where(end == size, segments - 1 + (splits - 1 - j), owner_at(behind))
        lax.fori_loop(least, most + 1, of_segment, 0)

        @pl.when(end == size)  # it has the fewest blocks
        def _():
            _prefetch(basis_ref, line)
            slots, plain = position_ref.shape[1], dataclasses.replace(n, stored=1)

            def rows_of(step):
                slot = step * TOKENS + row
                seen = arrays.load(position_ref, jnp.where(slot < slots, line * slots + slot, -1), -1) >= 0
                return jnp.where(seen, line * slots + slot, -1)

            query, functions = load_queries(plain, query_ref, line * n.group), step_functions(plain, scale, packed=False)
            whole = (raw_key_ref,), (raw_value_ref,)
            _attend(functions, *whole, query, rows_of, -(-slots // TOKENS), shared, edges, ahead=False)
            _write(n, written, shared, edges, (line + 1) * partials - 1, jnp.int32(-1))

        return carry

    for_each_list(low, steps, size, lists, of_list)


def _prefetch(basis_ref, line):
    """Ask for the bases of a list, which the next kernel reads."""
    size = basis_ref.shape[1] * 4
    lines = [".reg .pred p; .reg .b64 at; .reg .b32 x; mov.u32 x, %tid.x; and.b32 x, x, 127; setp.eq.s32 p, x, 0;"]
    lines.append(f"mad.wide.s32 at, $1, {size}, $0; @p cp.async.bulk.prefetch.L2.global [at], {size};")
    if basis_ref.shape[0] * size <= AHEAD and (current_machine().capability or (0,)) >= (9, 0):  # it came with Hopper
        assembly.run(lines, [basis_ref], [line])


def _body_join(out_ref, lse_ref, segment_ref, basis_ref, merged_ref, weights, sums, *, group, dim, width):
    # out [L, X, G, D], lse [L, X, G], segment [L, X], which ascends but for the last, -1; basis [L, M, D, D]; merged
    # [L, G, D], of which a program computes ``width`` columns. In shared memory the weight of each partial, [G, X], and the
    # sums of a segment, [G, 128].
    line, left = lax.axis_index("x"), lax.axis_index("y") * width
    partials, segments = segment_ref.shape[1], basis_ref.shape[1]
    size = weights.shape[0] // group
    number = arrays.counted(size)
    inside = number < partials
    segment = arrays.load(segment_ref, jnp.where(inside, line * partials + number, -1), segments)
    highest = jnp.int32(-1)  # segment with a token
    for g in range(group):
        lse = arrays.load(lse_ref, jnp.where(inside, (line * partials + number) * group + g, -1), -jnp.inf)
        weight = jnp.exp(lse - finite_or_zero(jnp.max(lse)))
        total = jnp.sum(weight)
        weight = weight / jnp.where(total > 0, total, 1.0)
        highest = jnp.maximum(highest, jnp.max(jnp.where(weight > 0, segment, -1)))
        arrays.store_shared(weights, g * size + number, weight)
    arrays.meet()
    thread, lanes = arrays.counted(t.THREADS), arrays.size_of(dim)
    channel = arrays.counted(lanes)
    held = jnp.minimum(channel, dim - 1)
    column, part = left + lax.rem(thread, width), lax.div(thread, width)
    each = dim * width // t.THREADS  # channels of a segment that a thread multiplies
    together, some = min(JOINED, each), max(JOINED // group, 1)

    def of_segment(s, totals):
        begin, end = (jnp.sum((inside & (segment >= 0) & (segment < s + i)).astype(jnp.int32)) for i in (0, 1))

        def collect(step, carry):
            rows = [jnp.minimum(begin + step * some + i, end - 1) for i in range(some)]
            parts = [
                [arrays.load(out_ref, ((line * partials + x) * group + g) * dim + held) for x in rows] for g in range(group)
            ]
            for i, x in enumerate(rows):  # all are loaded before anything is added
                shares = [arrays.load_shared(weights, arrays.spread(g * size + x, lanes)) for g in range(group)]
                real = begin + step * some + i < end
                carry = [y + jnp.where(real & (p > 0), p * q[i], 0.0) for y, p, q in zip(carry, shares, parts, strict=True)]
            return tuple(carry)

        nothing = (arrays.spread(0.0, lanes, jnp.float32),) * group
        for g, x in enumerate(lax.fori_loop(0, lax.div(end - begin + (some - 1), some), collect, nothing)):
            arrays.store_shared(sums, g * lanes + channel, x)
        arrays.meet()

        def project(step, totals):
            rows = [part * each + (step * together + i) for i in range(together)]
            bases = [arrays.load(basis_ref, column, rows=((line * segments + s) * dim + row, dim)) for row in rows]
            for row, x in zip(rows, bases, strict=True):
                totals = [y + arrays.load_shared(sums, g * lanes + row) * x for g, y in enumerate(totals)]
            return tuple(totals)

        totals = lax.fori_loop(0, each // together, project, totals)
        arrays.meet()
        return totals

    nothing = (arrays.spread(0.0, t.THREADS, jnp.float32),) * group
    totals = lax.fori_loop(0, highest + 1, of_segment, nothing)
    for g, x in enumerate(totals):
        arrays.store_shared(sums, g * lanes + thread, x)
    arrays.meet()
    for g in range(group):
        parts = [arrays.load_shared(sums, g * lanes + i * width + lax.rem(thread, width)) for i in range(t.THREADS // width)]
        share = arrays.load_shared(weights, arrays.spread(g * size + partials - 1, t.THREADS))
        x = arrays.load(out_ref, ((line * partials + partials - 1) * group + g) * dim + column)
        merged = functools.reduce(jnp.add, parts) + jnp.where(share > 0, x * share, 0.0)
        arrays.store(merged_ref, jnp.where(part < 1, (line * group + g) * dim + column, -1), merged)


def packed_attention(parts, query, key, value, basis, blocks, count, last, recent, *, scale, granule, span, owner):
    """Attend to the listed packed blocks and the raw buffer in one softmax."""
    rows, heads, segments, group, terms, dim = parts.shape
    lists, listed, slots = rows * heads, blocks.shape[2], key[0].shape[2]
    n = Vectors(dim=dim, rank=key[0].shape[3], group=group, stored=terms, terms=TERMS, dtype=key[0].dtype)
    groups = GROUPS if dim < 256 else 2  # of more registers
    steps, size = shares_of(lists, -(-listed * granule // TOKENS) + BUFFER, PROGRAMS * groups)
    splits = -(-size // steps) + (size % steps > 0)  # most programs of a list
    partials = splits + segments
    body = functools.partial(
        _body, n=n, heads=heads, slots=slots, segments=segments, granule=granule, span=span, scale=scale, steps=steps,
        size=size, splits=splits, groups=groups,
    )  # fmt: skip
    shapes = (
        ((lists, partials, group, dim), jnp.float32),
        ((lists, partials, group), jnp.float32),
        ((lists, partials), jnp.int32),
    )
    scratch = [(groups, x) for x in (WARPS * max(n.room // 4, group * dim), 2 * WARPS * group)]
    packed = [x.reshape(lists * slots, -1) for pair in (key, value) for x in pair]
    raw = [
        query.reshape(-1, dim),
        basis.reshape(lists, -1),
        *(x.reshape(-1, dim) for x in recent[:2]),
        recent[2].reshape(lists, -1),
    ]
    partial = arrays.program(
        body, [jax.ShapeDtypeStruct(*x) for x in shapes], grid=(-(-lists * size // (steps * groups)),),
        scratch=[plgpu.SMEM(x, jnp.float32) for x in scratch],
        groups=groups,
    )(
        parts.reshape(-1, dim), *packed, blocks.reshape(lists, listed), count.reshape(-1), last, *raw,
        *([] if owner is None else [owner]),
    )  # fmt: skip
    width = next(x for x in (32, 16, 8) if lists * dim >= x * LEAST or x == 8)
    scratch = group * arrays.size_of(partials), group * arrays.size_of(dim)
    (merged,) = arrays.program(
        functools.partial(_body_join, group=group, dim=dim, width=width),
        [jax.ShapeDtypeStruct((lists, group, dim), query.dtype)],
        grid=(lists, dim // width),
        scratch=[plgpu.SMEM((x,), jnp.float32) for x in scratch],
    )(*partial, basis.reshape(lists, segments, dim, dim))
    return merged.reshape(query.shape)


def check(parts, query, key, value, basis, blocks, count, last, recent, *, scale, granule, span, owner):
    """Raise ``NotImplementedError`` for what ``TAKES`` does not say."""
    rows, heads, slots, rank = key[0].shape
    if value[0].shape[3] != rank or not blocks.shape[2] * rank or rows * heads * slots >= 2**31:
        raise NotImplementedError(f"got keys {key[0].shape}, values {value[0].shape}, expected fewer, the same, and some")
    if (dtypes := {str(x.dtype) for x in (parts, query, key[0], value[0], *recent[:2])}) != {str(query.dtype)}:
        raise NotImplementedError(f"got dtypes {sorted(dtypes)}, expected one")
    Vectors(dim=query.shape[-1], rank=rank, group=parts.shape[3], stored=4, terms=TERMS, dtype=query.dtype).check()
