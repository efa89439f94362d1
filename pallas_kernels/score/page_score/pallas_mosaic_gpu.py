"""Page scores through Mosaic GPU, programs of one warpgroup that go from block to block; `vector_score` is the same kernel.

16 threads of a warp read the two bounds of a page, 16 bytes each, and multiply them with all query heads in float32. The next
block is on its way meanwhile.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.products import CHUNK, Products

STEPS = 8  # vectors of a block that a thread reads a part of; as many are on their way
FEW = 1056  # blocks that have a program each, eight for each streaming multiprocessor
PROGRAMS = 396  # three for each streaming multiprocessor of an H100 or H200
MOST_QUERIES = 8  # of a KV head, in registers; 16 where a page has one vector
TAKES = f"{arrays.HOPPER}, D a power of two from {CHUNK} to {32 * CHUNK}, G up to {MOST_QUERIES}"


def _body(*refs, n, vectors, added, held, pages, share, page_size, newest, first, joined, programs):
    # limit [L / share]; query [L, G, D]; low, and high if bounded, [L * P, D]; added [L, G, D] if given; position [L * P] if
    # held; then the scores [L, P], or [L, G, P] of each query head.
    limit_ref, query_ref, *refs, out_ref = refs
    vector_refs, added_ref = tuple(refs[:vectors]), refs[vectors] if added else None
    owner, program = lax.axis_index("x"), lax.axis_index("y")
    limit = arrays.scalar(limit_ref, lax.div(owner, share))
    row, head, writes = n.entries()
    step_row, line = n.step_rows(), owner if joined else owner * n.group + head

    def blocks_of(rows):  # of this program, which begins at its own number
        return lax.div(lax.div(rows + (n.rows - 1), n.rows) - program + (programs - 1), programs)

    def first_of(step):
        return (step * programs + program) * n.rows

    def load(step):
        return n.chunks(vector_refs, owner * pages + jnp.minimum(first_of(step) + step_row, pages - 1))

    def write(step, score):
        page = first_of(step) + row
        arrays.store(out_ref, jnp.where(writes & (page < pages), line * pages + page, -1), score)

    def add(step, chunks):
        ahead = load(jnp.minimum(step + 1, reading - 1))  # the last block again, which is near: not one more
        score, page = n.multiply(queries, chunks, [x.dtype for x in vector_refs]), first_of(step) + row
        if joined:
            score = n.largest(score)
        # NaN compares false, so a page without a token becomes -inf.
        score = jnp.where((page < used) & (page >= first) & (score > -jnp.inf), score, -jnp.inf)
        if held:
            score = jnp.where(arrays.load(refs[-1], owner * pages + jnp.minimum(page, pages - 1), -1) >= 0, score, -jnp.inf)
        write(step, jnp.where(page != used - 1, score, jnp.inf) if newest else score)
        return ahead

    used = lax.div(limit + (page_size - 1), page_size)
    chunks = load(0)  # before anything waits for the queries or the limit
    queries, reading = n.queries(query_ref, owner, added_ref), blocks_of(jnp.minimum(used, pages))
    lax.fori_loop(0, reading, add, chunks)
    nothing = arrays.spread(-jnp.inf, row.shape[0], jnp.float32)  # blocks behind the pages in use are not read

    def skip(step, carry):
        write(step, nothing)
        return carry

    lax.fori_loop(reading, blocks_of(pages), skip, 0)


def page_score(query, low, high, limit, *, page_size, reduce, newest):
    """Score every page for every KV head."""
    return scores(query, (low, high), limit, page_size=page_size, reduce=reduce, newest=newest)


def scores(query, vectors, limit, *, page_size=1, added=None, reduce, newest=False, position=None, first=0):
    """Score by two bounds, or by one vector; arguments as in `page_score` and `vector_score`."""
    rows, heads, group, dim = query.shape
    lists, pages, limit = rows * heads, vectors[0].shape[2], limit.reshape(-1)
    n = Products(group, dim, STEPS // len(vectors), bounded=len(vectors) > 1, summed=reduce == "sum")
    blocks = -(-pages // n.rows)
    programs = blocks if lists * blocks <= FEW else max(1, min(PROGRAMS // lists, blocks))
    operands = [query.reshape(lists, group, dim), *(x.reshape(lists * pages, dim) for x in vectors)]
    operands += [added.reshape(lists, group, dim)] * (added is not None) if added is not None else []
    operands += [position.reshape(-1)] if position is not None else []
    each = (group,) if reduce == "each" else ()
    body = functools.partial(
        _body, n=n, vectors=len(vectors), added=added is not None, held=position is not None, pages=pages,
        share=lists // limit.shape[0], page_size=page_size, newest=newest, first=first, joined=reduce != "each",
        programs=programs,
    )  # fmt: skip
    out = jax.ShapeDtypeStruct((lists, *each, pages), jnp.float32)
    (score,) = arrays.program(body, [out], grid=(lists, programs))(limit, *operands)
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
