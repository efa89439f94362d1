"""Page scores as one Pallas Triton kernel that reads each bound in use once; `vector_score` is the same kernel.

Grid (B*H, blocks of pages). The maximum over the group, or the score of each query head, needs matrix products of the whole
group with a block of pages. The sum over the group is linear in the query: the group is added up first, and a block is
multiplied with one float32 vector.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_head_dim
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.shared_memory import fitting_block
from pallas_kernels.numerics import product_precision


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        block: pages per program, a power of two of at least 16.
        num_warps: warps per program.
    """

    block: int = 64
    num_warps: int = 4


def fitted(config: Config, query: jax.Array, low: jax.Array, high: jax.Array | None) -> Config:
    """Shrink the config's blocks to fit the GPU's shared memory; raise ``NotImplementedError`` if none fits."""
    size = low.dtype.itemsize if query.dtype == low.dtype else 4
    rows, products = pl.next_power_of_2(query.shape[2]), 1 if high is None else 2

    def needed(block):
        return products * size * query.shape[-1] * (rows + block)  # the operands

    return dataclasses.replace(config, block=fitting_block(config.block, needed))


def _bounds(query, low, high):
    """Bound q.k for each query head, float32 [Gp, N]: query [Gp, D], low and high [N, D]."""
    # Tensor cores need one dtype; float32 holds every value of the other dtypes.
    if query.dtype != low.dtype:
        query, low, high = (None if x is None else x.astype(jnp.float32) for x in (query, low, high))
    dot = functools.partial(plt.dot, trans_b=True, precision=product_precision(query.dtype))
    if high is None:
        return dot(query, low)
    # max(q * low, q * high) = max(q, 0) * high + min(q, 0) * low
    return dot(jnp.maximum(query, 0), high) + dot(jnp.minimum(query, 0), low)


def _summed(query, vector):
    """Sum q.k over the group, float32 [N]: query [Gp, D], vector [N, D]."""
    return jnp.sum(vector.astype(jnp.float32) * jnp.sum(query.astype(jnp.float32), axis=0)[None, :], axis=1)


def _kernel(
    limit_ref, query_ref, low_ref, *refs, group, pages, share, page_size, bounded, added, held, least, reduce, newest, block
):
    # Of all lists: limit [L / share]. Of one list: query [Gp, D]; low [P, D]; high [P, D] if bounded; added [Gp, D] if given;
    # position [P] if held; out [P], or [G, P] of each query head. A program has `block` pages.
    *others, out_ref = refs
    # Pages in use: slots in use, divided by the page size and rounded up.
    used = (limit_ref[pl.program_id(0) // share] + page_size - 1) // page_size
    first = pl.program_id(1) * block
    page = first + jnp.arange(block, dtype=jnp.int32)
    inside = page < pages
    head = jnp.arange(query_ref.shape[0], dtype=jnp.int32)
    real = (head < group)[:, None]  # heads of zeros fill up the group

    def write(score):
        if reduce == "each":
            at = [jnp.broadcast_to(x, (head.shape[0], block)) for x in (head[:, None], page[None, :])]
            plt.store(out_ref.at[*at], score, mask=real & inside[None, :])
        else:
            plt.store(out_ref.at[page], score, mask=inside)

    @pl.when(first < used)
    def _():
        row = jnp.minimum(page, pages - 1)  # behind the last page lies memory of another list
        query, low = query_ref[...], low_ref[row, :]
        high = others[0][row, :] if bounded else None
        if added:
            query = query.astype(jnp.float32) + others[bounded][...]
        score = _summed(query, low) if reduce == "sum" else _bounds(query, low, high)
        if reduce == "max":
            score = jnp.max(jnp.where(real, score, -jnp.inf), axis=0)
        # NaN compares false, so a page without a token becomes -inf.
        number = jnp.broadcast_to(page[None, :] if reduce == "each" else page, score.shape)
        score = jnp.where((number < used) & (score > -jnp.inf), score, -jnp.inf)
        if newest:
            score = jnp.where(number == used - 1, jnp.inf, score)
        if held:
            score = jnp.where((others[-1][row] >= 0)[None, :], score, -jnp.inf)
        if least:
            score = jnp.where(number >= least, score, -jnp.inf)
        write(score)

    @pl.when(first >= used)  # a block behind the pages in use reads nothing
    def _():
        write(jnp.full((*head.shape, block) if reduce == "each" else (block,), -jnp.inf, jnp.float32))


def page_score(query, low, high, limit, *, page_size, reduce, newest, config: Config | None = None, interpret=False):
    """Score every page for every KV head; ``interpret=True`` runs anywhere, slowly."""
    options = {"page_size": page_size, "reduce": reduce, "newest": newest, "config": config, "interpret": interpret}
    return scores(query, low, high, limit, name="page_score", **options)


def scores(
    query, low, high, limit, *, name, page_size=1, added=None, reduce, newest=False, position=None, first=0,
    config: Config | None = None, interpret=False,
):  # fmt: skip
    """Score by bounds, or by one vector ``low`` if ``high`` is None; arguments as in `page_score` and `vector_score`."""
    config = fitted(Config(), query, low, high) if config is None else config
    rows, heads, group, dim = query.shape
    lists, pages, padded = rows * heads, low.shape[2], pl.next_power_of_2(group)

    def grouped(x: jax.Array) -> jax.Array:
        x = x.reshape(lists, group, dim)
        return x if padded == group else jnp.pad(x, ((0, 0), (0, padded - group), (0, 0)))

    operands = [grouped(query), *(x.reshape(lists, pages, dim) for x in (low, high) if x is not None)]
    if added is not None:
        operands.append(grouped(added))
    if position is not None:
        operands.append(position.reshape(lists, pages))
    limit = limit.reshape(-1)
    each = (group,) if reduce == "each" else ()
    score = triton_call(
        functools.partial(
            _kernel,
            group=group,
            pages=pages,
            share=lists // limit.shape[0],
            page_size=page_size,
            bounded=high is not None,
            added=added is not None,
            held=position is not None,
            least=first,
            reduce=reduce,
            newest=newest,
            block=config.block,
        ),
        grid=(lists, pl.cdiv(pages, config.block)),
        in_specs=[
            pl.BlockSpec(limit.shape, lambda i, j: (0,)),
            *(pl.BlockSpec((None, *x.shape[1:]), _list_of(x.ndim)) for x in operands),
        ],
        out_specs=pl.BlockSpec((None, *each, pages), lambda i, j: (i, *(0 for _ in each), 0)),
        out_shape=jax.ShapeDtypeStruct((lists, *each, pages), jnp.float32),
        num_warps=config.num_warps,
        num_stages=1,
        interpret=interpret,
        name=name,
    )(limit, *operands)
    return score.reshape(rows, heads, *each, pages)


def _list_of(ndim):
    """Map a program to its own list of an operand with ``ndim`` axes."""
    return lambda i, j: (i, *(0,) * (ndim - 1))


def check(query, low, high, limit, *, page_size, reduce, newest):
    """Raise ``NotImplementedError`` for dtypes and head dims that the kernel does not take."""
    check_scores(query, low, high)


def check_scores(query, low, high):
    """Raise what `check` raises; ``high`` may be None."""
    dtypes = {str(query.dtype), str(low.dtype)}
    if not dtypes <= {"bfloat16", "float16", "float32"}:
        raise NotImplementedError(f"got dtypes {sorted(dtypes)}, expected bfloat16, float16 or float32")
    dim = query.shape[-1]
    check_head_dim(dim)
    fitted(Config(), query, low, high)
