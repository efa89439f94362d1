"""Decode attention on a Hopper GPU: rows of keys and values gathered into a ring in shared memory, multiplied by `wgmma`.

Of the two warpgroups of a block the first multiplies: the query heads are rows of a product of 64, whose other rows repeat
the last head. Memory limits the kernel, so they cost nothing. The second copies rows of keys and values by `cp.async`, 16
bytes a thread, into the ring that `wgmma` reads, and finds the rows of the next block meanwhile. A row that does not enter
is zeros and has a tag that hides it. The blocks of threads that share a list are a cluster, and at the end each merges a
part of the output out of the shared memory of all: nothing else is launched, and no partial result reaches global memory.
"""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.pallas import pl, plgpu
from pallas_kernels._mosaic_gpu.steps import COPIERS, ROWS, Lists, Sizes, loader, merger, query_loader, tiled
from pallas_kernels._triton.quantised import refuse_codes
from pallas_kernels.machine import current_machine
from pallas_kernels.numerics import LOG2_E

MULTIPLYING, COPYING = 232, 136  # registers of a thread; there are 512 for the three warpgroups
# How many clusters of 1, 2, ... 8 programs an H200 runs at once (cudaOccupancyMaxActiveClusters). A cluster lies within a
# part of the GPU that has 18 multiprocessors or fewer, so 16 clusters of 8 would be two rounds.
ROOM = (132, 66, 39, 30, 22, 17, 15, 15)
MOST_CLUSTERS = 16  # of a list
JOIN = 3  # blocks that a program reads in the time of the launch that joins clusters


def check_machine(query: Any, key: Any, value: Any) -> None:
    """Raise ``NotImplementedError`` for machines, dtypes and shapes that `attend` does not take."""
    if (capability := current_machine().capability) != (9, 0):
        raise NotImplementedError(f"got compute capability {capability}, expected (9, 0), which has wgmma")
    refuse_codes(key, value)
    dtypes = {str(x.dtype) for x in (query, key, value)}
    if dtypes not in ({"bfloat16"}, {"float16"}):
        raise NotImplementedError(f"got dtypes {sorted(dtypes)}, expected bfloat16 or float16 for all")
    if key.shape != value.shape or key.shape[3] not in (64, 128, 256):
        raise NotImplementedError(f"got keys {key.shape} and values {value.shape}, expected head_dim 64, 128 or 256 of both")
    if math.prod(query.shape[2:-1]) > ROWS or not key.shape[2]:
        raise NotImplementedError(
            f"got {query.shape[2:-1]} query heads or queries, expected at most {ROWS} in all, and slots"
        )


def default_programs(lists: int, blocks: int) -> tuple[int, int]:
    """Choose how many programs a cluster has and how many clusters a list, so that all run at once and end soonest."""

    def rounds(work: tuple[int, int]) -> tuple[int, int]:
        splits, clusters = work
        return -(-blocks // (splits * clusters)) + (JOIN if clusters > 1 else 0), clusters

    sizes = [(i + 1, n) for i, most in enumerate(ROOM) for n in range(1, MOST_CLUSTERS + 1) if lists * n <= most]
    return min([(1, 1), *sizes], key=rounds)


def _body(n: Sizes, lists: Lists, scale: float, sizes: tuple[int, ...], out_dtype: Any, beside_dtype: Any):
    """Return the kernel over refs: query, key, value, position, query_position, parts beside and lists, each 0 or more."""

    def body(query_ref, key_ref, value_ref, *refs):
        *refs, out_ref, lse_ref, key_ring, value_ring, tags, full, free = refs
        ring, ends = (key_ring, value_ring, tags, full, free), [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        position, asked_ref, beside, listed = (tuple(refs[i:j]) for i, j in itertools.pairwise(ends))
        base, cluster, split = (lax.axis_index(name) for name in ("list", "cluster", "split"))
        programs, program = n.clusters * n.splits, cluster * n.splits + split
        b, h = lax.div(base, n.heads), lax.rem(base, n.heads)
        entries, scalars = lists.entries(listed, b, h)
        blocks, number = lax.div(entries + (n.block - 1), n.block), _same
        if lists.block_number is not None:
            blocks, number = lists.block_number(listed, b, h, blocks, n.block)
        steps = lax.div(blocks - program + (programs - 1), programs)
        load_query, load_asked = query_loader(n)
        many = 0 if not beside else beside[1].shape[2] if len(beside[1].shape) > 3 else 1
        publish, merge = merger(n, out_dtype, many, beside_dtype, n.splits)

        def scalars_of(step):
            return (number(step * programs + program) * n.block, *scalars)

        @pl.when(lax.axis_index("wg") == 0)
        def _():
            plgpu.set_max_registers(MULTIPLYING, action="increase")
            asked = load_asked(asked_ref[0], b) if n.queries else None
            sums = _multiply(n, scale, steps, load_query(query_ref, base), asked, ring)
            publish(key_ring.at[0], *sums)
            merge((key_ring.at[0],), out_ref, lse_ref, beside, (base, cluster, split))
            _end(n)

        @pl.when(lax.axis_index("wg") > 0)
        def _():
            plgpu.set_max_registers(COPYING, action="decrease")
            _copy(n, lists, steps, (key_ref, value_ref), position, listed, scalars_of, base, ring)
            _end(n)
            _end(n)

    return body


def _multiply(n, scale, steps, query, asked, ring):
    """Attend to the blocks of the ring: sums of values [64, D], maximum and softmax denominator [64], to base 2."""
    key_ring, value_ring, tags, full, free = ring
    by_row = plgpu.Layout.WGMMA.reduce(1)

    def add(step, carry):
        sums, maximum, total = carry
        at = lax.rem(step, n.stages)
        plgpu.barrier_wait(full.at[at])

        def products(ref):
            plgpu.wgmma(ref, query, key_ring.at[at].transpose((1, 0)))
            return ref[...]

        logits = pl.run_scoped(products, plgpu.ACC((ROWS, n.block), jnp.float32)) * (scale * LOG2_E)
        tag = plgpu.load(tags.at[at], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        tag = lax.broadcast_in_dim(tag, logits.shape, [1])
        if asked is None:
            logits = logits + tag
        else:
            logits = jnp.where(tag <= lax.broadcast_in_dim(asked, logits.shape, [0]), logits, -jnp.inf)
        risen = jnp.maximum(maximum, logits.max(axis=1))
        shift = jnp.where(risen == -jnp.inf, 0.0, risen)
        decay = jnp.exp2(maximum - shift)
        weight = jnp.exp2(logits - lax.broadcast_in_dim(shift, logits.shape, [0]))
        total = total * decay + weight.sum(axis=1)
        weight = weight.astype(n.dtype)
        sums = sums * lax.broadcast_in_dim(decay, sums.shape, [0])
        sums = pl.run_state(lambda ref: plgpu.wgmma(ref, weight, value_ring.at[at]))(plgpu.ACC.init(sums))
        plgpu.barrier_arrive(free.at[at])
        return sums, risen, total

    sums = plgpu.layout_cast(jnp.zeros((ROWS, n.dim), jnp.float32), plgpu.Layout.WGMMA)
    maximum = plgpu.layout_cast(jnp.full((ROWS,), -jnp.inf, jnp.float32), by_row)
    total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), by_row)
    return lax.fori_loop(0, steps, add, (sums, maximum, total))


def _copy(n, lists, steps, stored, position, listed, scalars_of, base, ring):
    """Copy the blocks of a program into the ring; the rows of the next two blocks are found meanwhile."""
    key_ring, value_ring, tags, full, free = ring
    fetch, resolve, copy, positions, settle, ready = loader(n, lists, bool(position))

    def slot(step):
        return lax.rem(step, n.stages)

    def settled(block, arrays, bits):
        at, write = jnp.maximum(block, 0), (block >= 0).astype(jnp.int32)
        return settle(arrays, bits, tags.at[slot(at)], write)

    def hand_over(block, bits, later):
        ready(later)(key_ring.at[slot(block)], value_ring.at[slot(block)], bits)
        plgpu.barrier_arrive(full.at[slot(block)])

    def load(step, carry):
        loaded, after, before, bits = carry
        rows = resolve(loaded, scalars_of(step))

        @pl.when(step >= n.stages)
        def _():
            plgpu.barrier_wait(free.at[slot(step)])

        copy(*stored, key_ring.at[slot(step)], value_ring.at[slot(step)], rows, base)
        now = rows, positions(position[0], rows, base) if position else rows, loaded[-1] if lists.biased else rows
        later = fetch(listed, scalars_of(step + 2))
        bits = settled(step - 1, before, bits)
        pl.when(step >= n.ahead - 1)(lambda: hand_over(step - (n.ahead - 1), bits, n.ahead - 1))
        return after, later, now, bits

    bits, none = (plgpu.layout_cast(jnp.zeros((t.THREADS * x,), jnp.int32), t.own(x)) for x in (1, n.each))
    loaded, after = (fetch(listed, scalars_of(jnp.int32(step))) for step in (0, 1))
    *_, before, bits = lax.fori_loop(0, steps, load, (loaded, after, (none,) * 3, bits))
    bits = settled(steps - 1, before, bits)
    for later in reversed(range(n.ahead - 1)):
        pl.when(steps > later)(functools.partial(hand_over, steps - 1 - later, bits, later))


def _same(step):
    return step


def _end(n: Sizes) -> None:
    """Wait for the cluster: after the sums are published, and before the memory that others read is given back."""
    if n.splits > 1:
        plgpu.inline_mgpu()(lambda ctx: t.meet_cluster())()


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, lists: Lists, *, entries: int, scale: float,
    position: jax.Array | None = None, query_position: jax.Array | None = None,
    beside: tuple[jax.Array, jax.Array] | None = None, parts: bool = False, programs: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Attend to the rows of lists.

    Args:
        query: [B, H, R, D], where R is G, or G * T in the order of heads with ``query_position``.
        key: [B, H, S, D].
        value: like ``key``.
        lists: which rows.
        entries: the most entries of a list.
        scale: factor of the logits.
        position: int32 [B, H, S]; slots at negative positions do not enter. None: all listed slots do.
        query_position: int32 [B, T]; a query sees the positions that are not after its own.
        beside: N parts of attention to something else, [B, H, N, R, D] and float32 [B, H, N, R]; or N = 1 without the axis.
        parts: True: the result is in parts, one of each cluster.
        programs: of a cluster, and clusters of a list; None chooses.

    Returns:
        out [B, H, R, D] and lse float32 [B, H, R]; with ``parts`` float32 [B, H, N, R, D] and [B, H, N, R].
    """
    batch, heads, group, dim = query.shape
    queries = 0 if query_position is None else query_position.shape[1]
    n = Sizes(heads, group, dim, key.shape[2], 1, 1, queries, query.dtype)
    splits, clusters = programs or default_programs(batch * heads, -(-entries // n.block))
    n = dataclasses.replace(n, splits=splits, clusters=clusters)
    groups = [
        () if x is None else x if isinstance(x, tuple) else (x,) for x in (position, query_position, beside, lists.operands)
    ]
    apart = parts or clusters > 1
    lead, made = (batch, heads, *(clusters,) * apart), jnp.float32 if apart else query.dtype
    rings = plgpu.SMEM((n.stages, n.block, dim), query.dtype, transforms=tiled())
    out, lse = _kernel(
        _body(n, lists, scale, tuple(map(len, groups)), made, beside and beside[0].dtype),
        lead + (group, dim),
        made,
        scratch_types=[
            rings,
            rings,
            plgpu.SMEM((n.stages, n.block), jnp.int32 if queries else jnp.float32),
            plgpu.Barrier(num_barriers=n.stages, num_arrivals=COPIERS),
            plgpu.Barrier(num_barriers=n.stages),
        ],
        grid=(batch * heads, clusters),
        grid_names=("list", "cluster"),
        cluster=(splits,),
        cluster_names=("split",),
        num_threads=1 + COPIERS,
        thread_name="wg",
    )(query, key, value, *(x for group in groups for x in group))
    if parts or clusters == 1:
        return out, lse

    def join(out_ref, lse_ref, joined_ref, joined_lse_ref):
        _, merge = merger(dataclasses.replace(n, clusters=1), query.dtype, clusters, jnp.float32, 0)
        base = lax.axis_index("list")
        merge((), joined_ref, joined_lse_ref, (out_ref, lse_ref), (base, base * 0, base * 0))

    return _kernel(join, query.shape, query.dtype, grid=(batch * heads,), grid_names=("list",))(out, lse)


def _kernel(body, shape, dtype, **options):
    """Make a kernel whose results are out of a shape and dtype, and lse float32."""
    lane = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    made = [jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:-1], jnp.float32)]
    return plgpu.kernel(body, out_type=made, compiler_params=lane, **options)
