"""Page scores as one kernel for TPUs that reads each bound in use once.

Grid (B, blocks of pages). A block has the pages of all KV heads. The numbers of pages in use are in scalar memory: blocks
behind them repeat the index of the last block in use, and a block in fast memory is not read again.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._mosaic.batching import rows_together
from pallas_kernels._mosaic.blocks import Config, default_config
from pallas_kernels._mosaic.limits import check_cache, check_dtypes, check_heads, where_it_is
from pallas_kernels._mosaic.pallas import pl, plt
from pallas_kernels._mosaic.softmax import products


def _kernel(used_ref, most_ref, query_ref, *refs, bounded, added, reduce, newest, block):
    # used int32 [B * H], pages in use of each head; most int32 [B], the largest `used` of a row; query [1, H, G, D];
    # low [1, H, N, D]; high [1, H, N, D] if bounded; added [1, H, G, D] if added; out [1, H, N]
    refs = list(refs)
    bounds = [refs.pop(0) for _ in range(1 + bounded)]
    more_ref = refs.pop(0) if added else None
    (out_ref,) = refs
    b, step = pl.program_id(0), pl.program_id(1)
    heads = query_ref.shape[1]
    page = step * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)

    @pl.when(step * block < most_ref[b])
    def _():
        def score_of(h, _):
            query = query_ref[0, h]
            if more_ref is not None:
                query = query.astype(jnp.float32) + more_ref[0, h]
            # max(q * low, q * high) = max(q, 0) * high + min(q, 0) * low
            parts = (jnp.minimum(query, 0), jnp.maximum(query, 0)) if bounded else (query,)
            score = sum(_product(part, bound[0, h], reduce) for part, bound in zip(parts, bounds, strict=True))
            score = jnp.max(score, axis=0, keepdims=True)
            used = used_ref[b * heads + h]
            # NaN compares false, so a page without a token becomes -inf.
            score = jnp.where((page < used) & (score > -jnp.inf), score, -jnp.inf)
            if newest:
                score = jnp.where(page == used - 1, jnp.inf, score)
            out_ref[0, pl.ds(h, 1), :] = score

        jax.lax.fori_loop(0, heads, score_of, None)

    @pl.when(step * block >= most_ref[b])
    def _():
        out_ref[...] = jnp.full_like(out_ref, -jnp.inf)


def _product(query, bound, reduce):
    """Multiply query [G, D] with each bound [N, D]: float32 [G, N], or their sum over G [1, N]."""
    if reduce == "sum":
        query = jnp.sum(query.astype(jnp.float32), axis=0, keepdims=True)
    if query.dtype != bound.dtype:  # float32 holds every value of the other dtypes
        query, bound = query.astype(jnp.float32), bound.astype(jnp.float32)
    return products(query, bound)


def page_score(query, low, high, limit, *, page_size, reduce, newest, config: Config | None = None, interpret=False):
    """Score every page for every KV head; ``interpret`` as in ``pallas_call`` runs anywhere."""
    options = {"page_size": page_size, "reduce": reduce, "newest": newest, "config": config, "interpret": interpret}
    return scores(query, low, high, limit, name="page_score", **options)


def scores(
    query, low, high, limit, added=None, *, name, page_size=1, reduce, newest=False, config: Config | None = None,
    interpret=False,
):  # fmt: skip
    """Score by bounds, or by one vector ``low`` if ``high`` is None; arguments as in `page_score` and `vector_score`."""
    config = default_config(low) if config is None else config
    options = {"name": name, "page_size": page_size, "reduce": reduce, "newest": newest, "interpret": interpret}
    run = functools.partial(_score, block=min(config.block, low.shape[2]), **options)
    return rows_together(run)(query, low, high, limit, added)


def _score(query, low, high, limit, added, *, name, page_size, reduce, newest, block, interpret):
    batch, heads, pages, dim = low.shape
    used = jnp.clip(-(-limit // page_size), 0, pages)
    used = jnp.broadcast_to(used.reshape(batch, -1), (batch, heads))
    bounds = [x for x in (low, high) if x is not None]
    queries = [query] if added is None else [query, added]

    def rows(b, step, used, most):
        return b, 0, jnp.minimum(step, jnp.maximum(pl.cdiv(most[b], block) - 1, 0)), 0

    def whole(b, step, used, most):
        return b, 0, 0, 0

    asked = pl.BlockSpec((1, *query.shape[1:]), whole)
    return pl.pallas_call(
        functools.partial(
            _kernel, bounded=high is not None, added=added is not None, reduce=reduce, newest=newest, block=block
        ),
        grid_spec=plt.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, pl.cdiv(pages, block)),
            in_specs=[asked, *[pl.BlockSpec((1, heads, block, dim), rows)] * len(bounds), *[asked] * (len(queries) - 1)],
            out_specs=pl.BlockSpec((1, heads, block), lambda b, step, used, most: (b, 0, step)),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, heads, pages), jnp.float32),
        cost_estimate=pl.CostEstimate(
            flops=2 * len(bounds) * query.shape[2] * low.size,
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in (*queries, *bounds)) + 4 * low.size // dim,
        ),
        interpret=interpret,
        name=name,
    )(used.reshape(-1), jnp.max(used, axis=1), query, *map(where_it_is, bounds), *queries[1:])


def check(query, low, high, limit, *, page_size, reduce, newest):
    """Raise ``NotImplementedError`` for dtypes and shapes that the kernel does not take."""
    check_scores(query, low, reduce)


def check_scores(query, low, reduce):
    """Raise what `check` raises."""
    if reduce == "each":
        raise NotImplementedError("got reduce='each', expected query heads that are joined")
    check_dtypes(query, low)
    check_cache(low)
    check_heads(low)
