"""Scores of packed vectors through Mosaic GPU: a warp takes 16 at a time, see `packed`."""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu import warps as w
from pallas_kernels._mosaic_gpu.packed import (
    HEADS,
    SIZES,
    VECTORS,
    Vectors,
    for_each_list,
    in_rows,
    load_queries,
    load_vectors,
    multiplied,
    placed,
    quad,
    shares_of,
    unpacked,
    warp,
)
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._mosaic_gpu.steps import numbers, scalar

WARPS = t.THREADS // w.LANES
PROGRAMS, GROUPS = 132, 4  # blocks that run on an H200 at once, and programs of each
AHEAD = 3  # steps before which vectors are loaded
TAKES = SIZES


def step_functions(n: Vectors, blocks: int, reduce):
    """Return functions that load the vectors of a step of a warp, and that multiply them and store the scores.

    Args:
        n: sizes.
        blocks: vectors of a list.
        reduce: see `packed_score`.
    """

    def rows(begin):
        first = scalar(begin) + warp() * VECTORS + t.signed(w.lane() // 4)
        return [first, first + VECTORS // 2]

    @plgpu.inline_mgpu(
        arg_types=((t.ref(),) * 2, (t.splat(),) * 3), return_type=numbers(2 * (4 * n.loads + n.bits), jnp.int32)
    )
    def load(ctx, refs, where):
        line, begin, count = map(scalar, where)
        seen = [x < count for x in rows(begin)]
        return t.made_of(load_vectors(n, *refs, [line * blocks + x for x in rows(begin)], seen))

    types = tuple(t.own(x) for x in (2 * (4 * n.loads + n.bits), n.groups * n.terms // 2 * (n.channels // 2)))

    @plgpu.inline_mgpu(arg_types=(t.ref(), t.ref(), *types, t.own(2), (t.splat(),) * 3))
    def score(ctx, ref, shared, loaded, query, mine, where):
        line, begin, count = map(scalar, where)
        place = t.number(t.address(shared)) + warp() * n.room
        found = multiplied(n, unpacked(n, placed(n, t.numbers_of(loaded), place, in_rows)), t.numbers_of(query))
        heads = [HEADS * group + quad() for group in range(n.groups)]
        for i, (row, held) in enumerate(zip(rows(begin), t.numbers_of(mine), strict=True)):
            score, held = [x[i] for x in found], held > 0
            if reduce is None:
                for head, x in zip(heads, score, strict=True):
                    x = (row < count).select(x, t.float_number(-jnp.inf))
                    at = t.element(line * n.group + head, blocks, row)
                    t.ptx("st.global.f32 [$0], $1;", t.at(t.address(ref), at, 4), x, where=held & (head < n.group))
                continue
            nothing, fold = (-jnp.inf, w.most) if reduce == "max" else (0.0, operator.add)
            score = [(head < n.group).select(x, t.float_number(nothing)) for head, x in zip(heads, score, strict=True)]
            x = w.over_quad(functools.reduce(fold, score), fold)
            x = (row < count).select(x * (1 / n.group) if reduce == "mean" else x, t.float_number(-jnp.inf))
            where = held & (quad() < 1)
            t.ptx("st.global.f32 [$0], $1;", t.at(t.address(ref), t.element(line, blocks, row), 4), x, where=where)

    return load, score


def _body(
    parts_ref,
    values_ref,
    words_ref,
    count_ref,
    last_ref,
    *refs,
    n,
    heads,
    blocks,
    segments,
    span,
    unit,
    steps,
    size,
    reduce,
    groups,
):
    # parts [L * M * G * N, D]; values [L * P, r]; words [L * P, W]; count and last [B]; owner [B, P] if given; score [L, P],
    # or [L, G, P]. In shared memory the vectors of each warp.
    *owner_ref, score_ref, shared = refs
    group, tile = lax.axis_index("group"), WARPS * VECTORS
    low, lists, shared = (lax.axis_index("x") * groups + group) * steps, score_ref.shape[0], shared.at[group]
    load, score = step_functions(n, blocks, reduce)
    # Two vectors of each thread: its lane's rows of a step.
    entry = arrays.counted(2 * t.THREADS)
    thread, second = entry & (t.THREADS - 1), lax.shift_right_logical(entry, 7)
    row = lax.shift_right_logical(thread, 5) * VECTORS + lax.div(thread & (w.LANES - 1), 4) + second * (VECTORS // 2)
    refs = values_ref, words_ref

    def of_list(line, carry):
        begin, end = (x * tile for x in (jnp.maximum(low - line * size, 0), jnp.minimum(low + steps - line * size, size)))
        b = lax.div(line, heads)
        count, last = lax.div(arrays.scalar(count_ref, b), unit), arrays.scalar(last_ref, b)
        held = jnp.minimum(count, end)

        def owner_of(row, load):
            row = jnp.clip(jnp.minimum(row, count - 1), 0, blocks - 1)
            if owner_ref:
                return load(owner_ref[0], b * blocks + row)
            return jnp.minimum(lax.div(row, span), last)

        def of_segment(s, carry):
            query = load_queries(n, parts_ref, (line * segments + s) * (n.group * n.stored))

            def follow(step, carry):
                loaded, *others = carry
                now = begin + step * tile
                later = load(refs, (line, now + AHEAD * tile, held))
                at = now + row
                mine = ((owner_of(at, arrays.load) == s) & (at < blocks)).astype(jnp.int32)
                score(score_ref, shared, loaded, query, mine, (line, now, count))
                return *others, later

            first = [load(refs, (line, begin + i * tile, held)) for i in range(AHEAD)]
            lax.fori_loop(0, lax.div(end - begin, tile), follow, tuple(first))
            return carry

        lax.fori_loop(owner_of(begin, arrays.scalar), owner_of(end - 1, arrays.scalar) + 1, of_segment, 0)
        return carry

    for_each_list(low, steps, size, lists, of_list)


def packed_score(parts, values, bitmap, count, last, *, span, unit, owner, reduce):
    """Multiply queries with packed vectors in the basis of each segment."""
    rows, heads, segments, group, terms, dim = parts.shape
    blocks, lists = values.shape[2], rows * heads
    n = Vectors(dim=dim, rank=values.shape[3], group=group, stored=terms, terms=terms, dtype=values.dtype)
    tiles = -(-blocks // (WARPS * VECTORS))
    groups = GROUPS if dim < 256 else 2  # of more registers
    steps, size = shares_of(lists, tiles, PROGRAMS * groups)
    operands = [parts.reshape(-1, dim), *(x.reshape(lists * blocks, -1) for x in (values, bitmap)), count, last]
    body = functools.partial(
        _body,
        n=n,
        heads=heads,
        blocks=blocks,
        segments=segments,
        span=span,
        unit=unit,
        steps=steps,
        size=size,
        reduce=reduce,
        groups=groups,
    )
    shape = (blocks,) if reduce is not None else (group, blocks)
    (score,) = arrays.program(
        body,
        [jax.ShapeDtypeStruct((lists, *shape), jnp.float32)],
        grid=(-(-lists * size // (steps * groups)),),
        scratch=[plgpu.SMEM((groups, WARPS * n.room // 4), jnp.int32)],
        groups=groups,
    )(*operands, *([] if owner is None else [owner]))
    return score.reshape(rows, heads, *shape)


def check(parts, values, bitmap, count, last, *, span, unit, owner, reduce):
    """Raise ``NotImplementedError`` for what ``TAKES`` does not say."""
    rows, heads, blocks, rank = values.shape
    if not blocks * rank or rows * heads * blocks * parts.shape[3] >= 2**31:
        raise NotImplementedError(f"got {parts.shape[3]} query heads, values {values.shape}, expected fewer, and some")
    Vectors(dim=parts.shape[5], rank=rank, group=parts.shape[3], stored=4, terms=4, dtype=values.dtype).check()
