"""Page scores through Mosaic GPU, a program of one warpgroup for each block of pages; `vector_score` is the same kernel.

16 threads of a warp read the two bounds of a page, 16 bytes each, and multiply them with all query heads in float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.pallas import pl
from pallas_kernels._mosaic_gpu.products import CHUNK, Products

STEPS = 8  # pages that a thread reads a part of
MOST_QUERIES = 8  # of a KV head, in registers; 16 where a page has one vector


def _body(*refs, n, vectors, added, held, pages, share, page_size, newest, first, joined):
    # limit [L / share]; query [L, G, D]; low, and high if bounded, [L * P, D]; added [L, G, D] if given; position [L * P] if
    # held; then the scores [L, P], or [L, G, P] of each query head.
    limit_ref, query_ref, *refs, out_ref = refs
    vector_refs, added_ref = tuple(refs[:vectors]), refs[vectors] if added else None
    owner, begin = lax.axis_index("x"), lax.axis_index("y") * n.rows
    used = lax.div(limit_ref[lax.div(owner, share)] + (page_size - 1), page_size)
    row, head, writes = n.entries()
    page = begin + row
    line = owner if joined else owner * n.group + head
    at = jnp.where(writes & (page < pages), line * pages + page, -1)

    @pl.when(begin < used)
    def _():
        read = owner * pages + jnp.minimum(begin + n.step_rows(), pages - 1)
        score = n.run(query_ref, vector_refs, owner, read, added_ref)
        if joined:
            score = n.largest(score)
        # NaN compares false, so a page without a token becomes -inf.
        score = jnp.where((page < used) & (page >= first) & (score > -jnp.inf), score, -jnp.inf)
        if held:
            score = jnp.where(arrays.load(refs[-1], owner * pages + jnp.minimum(page, pages - 1), -1) >= 0, score, -jnp.inf)
        if newest:
            score = jnp.where(page != used - 1, score, jnp.inf)
        arrays.store(out_ref, at, score)

    @pl.when(begin >= used)  # a block behind the pages in use reads nothing
    def _():
        arrays.store(out_ref, at, arrays.spread(-jnp.inf, at.shape[0], jnp.float32))


def page_score(query, low, high, limit, *, page_size, reduce, newest):
    """Score every page for every KV head."""
    return scores(query, (low, high), limit, page_size=page_size, reduce=reduce, newest=newest)


def scores(query, vectors, limit, *, page_size=1, added=None, reduce, newest=False, position=None, first=0):
    """Score by two bounds, or by one vector; arguments as in `page_score` and `vector_score`."""
    rows, heads, group, dim = query.shape
    lists, pages, limit = rows * heads, vectors[0].shape[2], limit.reshape(-1)
    n = Products(group, dim, STEPS, bounded=len(vectors) > 1, summed=reduce == "sum")
    operands = [query.reshape(lists, group, dim), *(x.reshape(lists * pages, dim) for x in vectors)]
    operands += [added.reshape(lists, group, dim)] * (added is not None) if added is not None else []
    operands += [position.reshape(-1)] if position is not None else []
    each = (group,) if reduce == "each" else ()
    body = functools.partial(
        _body, n=n, vectors=len(vectors), added=added is not None, held=position is not None, pages=pages,
        share=lists // limit.shape[0], page_size=page_size, newest=newest, first=first, joined=reduce != "each",
    )  # fmt: skip
    out = jax.ShapeDtypeStruct((lists, *each, pages), jnp.float32)
    (score,) = arrays.program(body, [out], grid=(lists, -(-pages // n.rows)))(limit, *operands)
    return score.reshape(rows, heads, *each, pages)


def check(query, low, high, limit, *, page_size, reduce, newest):
    """Raise ``NotImplementedError`` for GPUs, dtypes, head dims and groups that the kernel does not take."""
    check_scores(query, (low, high))


def check_scores(query, vectors):
    """Raise what `check` raises, of bounds or of one vector."""
    arrays.check_hopper()
    arrays.check_floats(query, *vectors)
    (group, dim), rows = query.shape[2:], vectors[0].shape[:3]
    if dim & (dim - 1) or not CHUNK <= dim <= 32 * CHUNK:
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from {CHUNK} to {32 * CHUNK}")
    most = MOST_QUERIES * (3 - len(vectors))
    if group > most or not rows[2] or rows[0] * rows[1] * rows[2] * group >= 2**31:
        raise NotImplementedError(f"got {group} query heads and {rows} pages, expected at most {most} and 2**31 in all")
