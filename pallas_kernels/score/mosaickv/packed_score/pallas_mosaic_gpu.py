"""Scores of packed vectors through Mosaic GPU: a vector for each thread, its products with all query heads.

As for Triton, a thread walks through the bits that are set, and reads the entries of all heads at each bit's channel from a
table that stays in the first-level cache.
"""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._triton.packed_vectors import check_format, query_table

MOST_QUERIES = 8  # of a KV head, in registers
WORD = 32  # channels of a word of a bitmap


def _products(refs, line, row, first, *, words, rank, padded):
    """Multiply the vectors ``row`` int32 [128] of list ``line`` with ``padded`` queries: as many float32 [128].

    ``refs`` have the table [L, M * D * Gp] of `query_table`, values [L * P, r] and bitmaps [L * P, W]; ``first`` int32 [128]
    is the entry of the table at which the vector's segment begins.
    """
    ref, own, kind = plgpu.RefType(), t.own(1), jnp.dtype(refs[1].dtype)
    out = plgpu.ShapeDtypeStruct((t.THREADS,), jnp.float32, layout=own)
    width = refs[0].shape[1]

    @plgpu.inline_mgpu(arg_types=((ref,) * 3, plgpu.Layout.WG_SPLAT, own, own), return_type=(out,) * padded)
    def run(ctx, refs, line, row, first):
        table, values, bitmap = (t.address(x) for x in refs)
        (row,), (first,) = t.numbers_of(row), t.numbers_of(first)
        table = t.at(table, t.element(t.number(t.value(line)), width, first), 4)
        word = [t.load_int(t.at(bitmap, t.element(row, words, t.number(k)), 4)) for k in range(words)]
        if rank * kind.itemsize % 16:
            places = [t.at(values, t.element(row, rank, t.number(i)), kind.itemsize) for i in range(rank)]
            value = [t.load_float(place, kind) for place in places]
        else:
            each = 8 if rank % 8 == 0 else 4
            value = [
                x
                for i in range(0, rank, each)
                for x in t.load_some(t.at(values, t.element(row, rank, t.number(i)), kind.itemsize), kind, each)
            ]
        begin = [t.number(0)]  # values before each word
        for x in word[:-1]:
            begin.append(begin[-1] + t.popcount(x))
        left, base = word[0], t.number(0)  # bits of the word that are left, and the entry of the word's first channel
        sums = [t.float_number(0)] * padded
        for i in range(rank):
            # Of words that begin at the same value, all but the last are empty.
            for k in range(1, words):
                here = begin[k] == i
                left, base = here.select(word[k], left), here.select(t.number(WORD * k * padded), base)
            below = left - 1
            # The zeros below the lowest set bit are its channel. Where no bit is left, the value is zero.
            entry = base + t.popcount((left ^ -1) & below & 0x7FFFFFFF) * padded
            left = left & below
            query = t.load_some(t.at(table, entry, 4), jnp.dtype(jnp.float32), padded)
            sums = [t.fused(total, (value[i], x)) for total, x in zip(sums, query, strict=True)]
        return tuple(t.made_of([x], floats=True) for x in sums)

    return run(refs, line, row, first)


def _body(
    table_ref, values_ref, words_ref, count_ref, last_ref, *refs, heads, blocks, span, unit, dim, group, padded, reduce
):
    # table [L, M * D * Gp]; values [L * P, r]; words [L * P, W]; count and last [B]; owner [B, P] if given; score [L, P], or
    # [L, G, P].
    *owner_ref, score_ref = refs
    line, row = lax.axis_index("x"), lax.axis_index("y") * t.THREADS + arrays.counted(t.THREADS)
    b = lax.div(line, heads)
    count = lax.div(arrays.scalar(count_ref, b), unit)
    # Threads behind the last vector read that vector again; their scores become -inf below.
    read = jnp.clip(jnp.minimum(row, count - 1), 0, blocks - 1)
    if owner_ref:
        segment = arrays.load(owner_ref[0], b * blocks + read)
    else:
        segment = jnp.minimum(lax.div(read, span), arrays.scalar(last_ref, b))
    sizes = {"words": words_ref.shape[1], "rank": values_ref.shape[1], "padded": padded}
    operands = (table_ref, values_ref, words_ref), line, line * blocks + read, segment * (dim * padded)
    scores = _products(*operands, **sizes)[:group]
    if reduce is not None:
        fold = jnp.maximum if reduce == "max" else operator.add
        scores = [functools.reduce(fold, scores) / (group if reduce == "mean" else 1)]
    for g, score in enumerate(scores):
        at = jnp.where(row < blocks, (line * len(scores) + g) * blocks + row, -1)
        arrays.store(score_ref, at, jnp.where(row < count, score, -jnp.inf))


def packed_score(parts, values, bitmap, count, last, *, span, unit, owner, reduce):
    """Multiply queries with packed vectors in the basis of each segment."""
    rows, heads, _, group, _, dim = parts.shape
    blocks, lists = values.shape[2], rows * heads
    table = query_table(parts)
    operands = [table, *(x.reshape(lists * blocks, -1) for x in (values, bitmap)), count, last]
    body = functools.partial(
        _body, heads=heads, blocks=blocks, span=span, unit=unit, dim=dim, group=group, reduce=reduce,
        padded=table.shape[1] // (parts.shape[2] * dim),
    )  # fmt: skip
    shape = (blocks,) if reduce is not None else (group, blocks)
    out = [jax.ShapeDtypeStruct((lists, *shape), jnp.float32)]
    (score,) = arrays.program(body, out, grid=(lists, -(-blocks // t.THREADS)))(
        *operands, *([] if owner is None else [owner])
    )
    return score.reshape(rows, heads, *shape)


def check(parts, values, bitmap, count, last, *, span, unit, owner, reduce):
    """Raise ``NotImplementedError`` for other GPUs, head dims, dtypes and groups than the kernel takes."""
    arrays.check_hopper()
    check_format(parts.shape[-1], parts.dtype, values.dtype)
    rows, heads, blocks, rank = values.shape
    if parts.shape[3] > MOST_QUERIES or not blocks * rank or rows * heads * blocks * parts.shape[3] >= 2**31:
        raise NotImplementedError(f"got {parts.shape[3]} query heads, values {values.shape}, expected at most {MOST_QUERIES}")
