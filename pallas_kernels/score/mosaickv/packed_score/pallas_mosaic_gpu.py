"""Scores of packed vectors through Mosaic GPU: a vector for each thread, its products with all query heads."""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.packed import MOST_QUERIES, products
from pallas_kernels._triton.packed_vectors import check_format, query_table


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
    refs = table_ref, values_ref, words_ref
    scores = products(refs, line, line * blocks + read, segment * (dim * padded), padded)[:group]
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


TAKES = f"{arrays.HOPPER}, D of 32 to 256, G up to {MOST_QUERIES}"


def check(parts, values, bitmap, count, last, *, span, unit, owner, reduce):
    """Raise ``NotImplementedError`` for other GPUs, head dims, dtypes and groups than the kernel takes."""
    arrays.check_hopper()
    check_format(parts.shape[-1], parts.dtype, values.dtype)
    rows, heads, blocks, rank = values.shape
    if parts.shape[3] > MOST_QUERIES or not blocks * rank or rows * heads * blocks * parts.shape[3] >= 2**31:
        raise NotImplementedError(f"got {parts.shape[3]} query heads, values {values.shape}, expected at most {MOST_QUERIES}")
