"""Decode attention over contiguous slots as one kernel for TPUs.

Grid (B, blocks). A block has the slots of all KV heads, so that positions are read once. The limit of each row is in scalar
memory: blocks behind it repeat the index of the last block below it, and a block in fast memory is not read again.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._mosaic import softmax
from pallas_kernels._mosaic.batching import rows_together
from pallas_kernels._mosaic.blocks import Config, default_config
from pallas_kernels._mosaic.limits import check_cache, check_dtypes, check_heads, where_it_is
from pallas_kernels._mosaic.pallas import pl, plt


def _kernel(
    limit_ref,  # int32 [B]
    query_ref,  # [1, H, G, D]
    key_ref,  # [1, H, N, D]
    value_ref,  # [1, H, N, D]
    position_ref,  # [1, H, N]
    out_ref,  # [1, H, G, D]
    lse_ref,  # [1, H, G, 1]
    *sums,
    scale,
    block,
):
    # The running sums of each head are [H, G, 1], [H, G, 1] and [H, G, D].
    b, step = pl.program_id(0), pl.program_id(1)
    heads, group, dim = query_ref.shape[1:]
    slot = step * block + jax.lax.broadcasted_iota(jnp.int32, (1, block), 1)

    def each_head(run):
        jax.lax.fori_loop(0, heads, lambda h, _: run(h), None)

    @pl.when(step == 0)
    def _():
        @each_head
        def _(h):
            for ref, x in zip(sums, softmax.nothing(group, dim), strict=True):
                ref[h] = x

    @pl.when(step * block < limit_ref[b])
    def _():
        @each_head
        def _(h):
            # Behind the end of the cache a block may hold anything, even as positions.
            held = (position_ref[0, pl.ds(h, 1), :] >= 0) & (slot < limit_ref[b])
            before = tuple(ref[h] for ref in sums)
            after = softmax.add_block(before, query_ref[0, h], key_ref[0, h], value_ref[0, h], held, scale)
            for ref, x in zip(sums, after, strict=True):
                ref[h] = x

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        @each_head
        def _(h):
            out, lse = softmax.result(tuple(ref[h] for ref in sums))
            out_ref[0, h] = out.astype(out_ref.dtype)
            lse_ref[0, h] = lse


def dense_decode(query, key, value, *, position, limit, scale, config: Config | None = None, interpret=False):
    """Attend with one query per head to all tokens below a limit; ``interpret`` as in ``pallas_call`` runs anywhere."""
    config = default_config(key) if config is None else config
    run = functools.partial(_attend, scale=scale, block=min(config.block, key.shape[2]), interpret=interpret)
    return rows_together(run)(query, key, value, position, limit)


def _attend(query, key, value, position, limit, *, scale, block, interpret):
    batch, heads, group, dim = query.shape
    num_slots = key.shape[2]

    def rows(b, step, limit):
        return b, 0, jnp.minimum(step, jnp.maximum(pl.cdiv(limit[b], block) - 1, 0)), 0

    def whole(b, step, limit):
        return b, 0, 0, 0

    out, lse = pl.pallas_call(
        functools.partial(_kernel, scale=scale, block=block),
        grid_spec=plt.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, pl.cdiv(num_slots, block)),
            in_specs=[
                pl.BlockSpec((1, heads, group, dim), whole),
                pl.BlockSpec((1, heads, block, dim), rows),
                pl.BlockSpec((1, heads, block, dim), rows),
                pl.BlockSpec((1, heads, block), lambda *at: rows(*at)[:3]),
            ],
            out_specs=(pl.BlockSpec((1, heads, group, dim), whole), pl.BlockSpec((1, heads, group, 1), whole)),
            scratch_shapes=[plt.VMEM((heads, group, n), jnp.float32) for n in (1, 1, dim)],
        ),
        out_shape=(jax.ShapeDtypeStruct(query.shape, query.dtype), jax.ShapeDtypeStruct((*query.shape[:3], 1), jnp.float32)),
        cost_estimate=_cost(query, key),
        interpret=interpret,
        name="dense_decode",
    )(jnp.clip(limit, 0, num_slots), query, *map(where_it_is, (key, value, position)))
    return out, lse[..., 0]


def _cost(query, key):
    """Estimate the work for the compiler, as if every slot were below the limit."""
    slots, group = key.size // key.shape[3], query.shape[2]
    asked = 2 * query.size * query.dtype.itemsize + 4 * query.size // query.shape[3]
    return pl.CostEstimate(
        flops=4 * group * key.size,
        transcendentals=group * slots,
        bytes_accessed=2 * key.size * key.dtype.itemsize + 4 * slots + asked,
    )


def check(query, key, value, *, position, limit, scale):
    """Raise ``NotImplementedError`` for dtypes, head dims and caches that the kernel does not take."""
    check_dtypes(query, key, value)
    check_cache(key)
    check_heads(key)
