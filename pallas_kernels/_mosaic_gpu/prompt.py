"""Attention of a prompt's queries on a Hopper GPU: two warpgroups multiply, and a third one fills the ring that they read.

Each of the two holds 64 queries of a head. It issues the product of its last weights with their values together with that of
its queries with the next keys, and the softmax of one runs beside the products of the other. Two programs are a cluster: the
copy engine brings a block of keys to both, so the second-level cache, which otherwise limits them, is asked once for 256
queries. Blocks are read from the last one back: first come those that need a mask, and of them first the one that ends behind
the last token, where values that belong to no token are overwritten with zeros.

**Source**: FlashAttention-3 (arXiv:2407.08608), section 3.
**Departures**: warpgroups do not wait for turns at the tensor cores, and the product with keys is issued second. Both were
slower here. A program attends for 128 queries and ends.

With a threshold it skips blocks as BLASST does (arXiv:2512.12087): where the largest logits of a warpgroup's 64 queries in a
block are all too far below those in the blocks before, it computes no weights and no product with the values.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.pallas import mgpu, pl, plgpu, vector
from pallas_kernels.machine import current_machine
from pallas_kernels.numerics import LOG2_E

ROWS = 64  # queries of a warpgroup
TEAMS = 2  # warpgroups that multiply
MULTIPLYING, COPYING = 240, 24  # registers of a thread; there are 504 for the three warpgroups
BLOCK, RING = 192, 192  # keys of a block; KiB of the ring
SHARING = 2  # programs of a cluster: the GPU is not full of larger ones (`decode.ROOM`)
ALIGNED = 8  # rows of a tile of the copy engine, at which its copies begin


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a kernel; ``scale`` is that of logits to base 2."""

    heads: int
    group: int
    tokens: int
    slots: int
    dim: int
    dtype: Any
    scale: float

    @property
    def strips(self) -> int:
        """Tiles of 64 queries that share a KV head: heads of a group that see the same keys follow each other."""
        return -(-self.tokens // ROWS) * self.group

    @property
    def clusters(self) -> int:
        """Clusters of a KV head."""
        return -(-self.strips // (TEAMS * SHARING))

    @property
    def stages(self) -> int:
        """Blocks of keys in the ring, and of values."""
        return RING * 1024 // (4 * BLOCK * self.dim)


def check(query: Any, key: Any, value: Any, **options: Any) -> None:
    """Raise ``NotImplementedError`` for what `attend` does not take."""
    if not key.shape[2] or key.shape[2] % ALIGNED:
        raise NotImplementedError(f"got {key.shape[2]} slots, expected a positive multiple of {ALIGNED}")
    check_kind(query, key, value, **options)


def check_kind(query: Any, key: Any, value: Any, *, scale: float, **_: Any) -> None:
    """Raise ``NotImplementedError`` for machines, dtypes, widths and scales that `attend` does not take."""
    if (capability := current_machine().capability) != (9, 0):
        raise NotImplementedError(f"got compute capability {capability}, expected (9, 0), which has wgmma")
    dtypes = {str(x.dtype) for x in (query, key, value)}
    if dtypes not in ({"bfloat16"}, {"float16"}):
        raise NotImplementedError(f"got dtypes {sorted(dtypes)}, expected all bfloat16 or all float16")
    if query.shape[-1] not in (64, 128):
        raise NotImplementedError(f"got head_dim {query.shape[-1]}, expected 64 or 128")
    if scale <= 0:
        raise NotImplementedError(f"got scale {scale}, expected a positive one")


def _tiled():
    return plgpu.TilingTransform((ALIGNED, 64)), plgpu.SwizzleTransform(128)


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, *, bounds: jax.Array, scale: float, threshold: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Attend with query [B, H, G, T, D] to key and value [B, H, S, D].

    Args:
        query: rows of no token may hold anything.
        key: slots behind the last token may hold anything.
        value: like ``key``.
        bounds: int32 [B, 3]: how many slots the first query sees, at least one, where each later query sees one more; how
            many slots hold tokens, beyond which none sees; how many queries are tokens.
        scale: factor of the logits, positive.
        threshold: float32 [B, H, G], as for `prefix_attention`.

    Returns:
        out [B, H, G, T, D] and lse float32 [B, H, G, T]; 0 and -inf where a query is no token.
    """
    batch, heads, group, tokens, dim = query.shape
    query = jnp.pad(query, [(0, 0)] * 3 + [(0, -tokens % ALIGNED), (0, 0)])
    n = Sizes(heads, group, query.shape[3], key.shape[2], dim, query.dtype, scale * LOG2_E)
    lists, padded = batch * heads * group, n.strips // group * ROWS
    ring = plgpu.SMEM((n.stages, BLOCK, dim), query.dtype, transforms=_tiled())
    full, free = (
        plgpu.Barrier(num_barriers=n.stages),
        plgpu.ClusterBarrier(collective_axes=("member",), num_barriers=n.stages, num_arrivals=TEAMS),
    )
    gaps = [] if threshold is None else [threshold.reshape(lists) / scale]
    out, lse = plgpu.kernel(
        functools.partial(_run, n, *[] if gaps else [None]),
        out_type=[
            jax.ShapeDtypeStruct((lists, n.tokens, dim), query.dtype),
            jax.ShapeDtypeStruct((lists, padded), jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((TEAMS, ROWS, dim), query.dtype, transforms=_tiled()),
            *(ring, ring),
            plgpu.Barrier(num_barriers=TEAMS),
            *(full, full, free, free),
            plgpu.Barrier(),
            plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=TEAMS + 1),
        ],
        grid=(batch * heads * n.clusters,),
        grid_names=("cluster",),
        cluster=(SHARING,),
        cluster_names=("member",),
        num_threads=TEAMS + 1,
        thread_name="team",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*gaps, bounds, query.reshape(lists, n.tokens, dim), *(x.reshape(-1, dim) for x in (key, value)))
    out, lse = out[:, :tokens], lse[:, :tokens]
    return out.reshape(batch, heads, group, tokens, dim), lse.reshape(batch, heads, group, tokens)


def _run(n, gap_ref, bounds_ref, query_ref, key_ref, value_ref, out_ref, lse_ref, queries, keys, values, asked, *barriers):
    """Attend for two strips of a cluster's four; clusters with the most keys come first."""
    cluster, member, team = (lax.axis_index(name) for name in ("cluster", "member", "team"))
    base, number = lax.div(cluster, n.clusters), n.clusters - 1 - lax.rem(cluster, n.clusters)
    *barriers, done = barriers
    ring, row, first = (keys, values, *barriers), lax.div(base, n.heads), TEAMS * SHARING * number
    begin, end, real = (bounds_ref[row, i] for i in range(3))
    last = lax.div(jnp.minimum(first + TEAMS * SHARING - 1, n.strips - 1), n.group)
    seen = jnp.minimum(begin + (ROWS * (last + 1) - 1), end)
    steps = jnp.where(ROWS * lax.div(first, n.group) < real, lax.div(seen + (BLOCK - 1), BLOCK), 0)

    @pl.when(team < TEAMS)
    def _():
        plgpu.set_max_registers(MULTIPLYING, action="increase")
        strip = jnp.minimum(first + TEAMS * member + team, n.strips - 1)
        token, head = ROWS * lax.div(strip, n.group), base * n.group + lax.rem(strip, n.group)
        tile, place = queries.at[team], pl.ds(token, ROWS)
        plgpu.copy_gmem_to_smem(query_ref.at[head, place], tile, asked.at[team])
        plgpu.barrier_wait(asked.at[team])

        def write(out, lse):
            tile[...] = out.astype(n.dtype)
            lse_ref[head, place] = lse

        @pl.when(steps > 0)
        def _():
            gap = None if gap_ref is None else gap_ref[head]
            run = functools.partial(_strip, n, tile, begin + token, end, real - token, steps, ring, gap)
            write(*pl.run_scoped(run, plgpu.ACC((ROWS, n.dim), jnp.float32)))

        pl.when(steps == 0)(lambda: write(_filled((ROWS, n.dim), 0), _filled((ROWS,), -jnp.inf)))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, out_ref.at[head, place])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(team == TEAMS)
    def _():
        plgpu.set_max_registers(COPYING, action="decrease")
        _copy(n, steps, end, base * n.slots, (key_ref, value_ref), ring)

    plgpu.barrier_arrive(done)  # the other program may still write here
    plgpu.barrier_wait(done)


def _filled(shape, number):
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, number, jnp.float32), layout)


def _strip(n, tile, begin, end, real, steps, ring, gap, sums):
    """Attend for the 64 queries of a tile, of which the first one sees ``begin`` slots: out [64, D], lse [64].

    With a ``gap``, blocks that all queries see whole are skipped where all their logits are further below.
    """
    keys, values, key_full, value_full, key_free, value_free, _ = ring

    row = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=plgpu.Layout.WGMMA.reduce(1))

    def hide(logits, step):
        return _hide(logits, jnp.minimum(row + begin, end) - (steps - 1 - step) * BLOCK)

    def weigh(logits, maximum, risen, masked):
        """Return what earlier sums are multiplied by, and weights."""
        scaled = risen * n.scale
        if masked:  # a row that sees nothing yet
            scaled = jnp.where(risen == -jnp.inf, 0.0, scaled)
        weights = jnp.exp2(logits * n.scale - lax.broadcast_in_dim(scaled, logits.shape, [0]))
        return jnp.exp2(maximum * n.scale - scaled), weights

    def score(at, scores):
        plgpu.wgmma(scores, tile, keys.at[at].transpose((1, 0)))
        return plgpu.wgmma_accumulator_load(scores)

    def add(masked, step, maximum, total, weights):
        now, before = lax.rem(step, n.stages), lax.rem(step - 1, n.stages)
        plgpu.barrier_wait(key_full.at[now])
        plgpu.barrier_wait(value_full.at[before])

        def multiply(scores):
            plgpu.wgmma(sums, weights, values.at[before])
            return score(now, scores)

        logits = pl.run_scoped(multiply, room)
        plgpu.barrier_arrive(value_free.at[before])
        plgpu.barrier_arrive(key_free.at[now])
        if gap is not None and not masked:
            step, logits = pass_by(step, logits, maximum)
        logits = hide(logits, step) if masked else logits
        risen = jnp.maximum(maximum, logits.max(axis=1))
        held = plgpu.wgmma_accumulator_load(sums, wait_n=None)
        decay, heavy = weigh(logits, maximum, risen, masked)
        sums[...] = held * lax.broadcast_in_dim(decay, held.shape, [0])
        return step + 1, risen, total * decay + heavy.sum(axis=1), heavy.astype(n.dtype)

    def add_blocks(first, last, masked, carry):
        return lax.while_loop(lambda x: x[0] < last, lambda x: add(masked, *x), (first, *carry))[1:]

    def pass_by(step, logits, maximum):
        """Go on to the first block that is not skipped; no block that is skipped raises the maximum."""

        def skipped(carry):
            high = (row < real) & (carry[1].max(axis=1) >= maximum - gap)
            return (carry[0] < steps - 1) & (_any(jnp.where(high, 1, 0)) == 0)

        def go_on(carry):
            at, now = lax.rem(carry[0], n.stages), lax.rem(carry[0] + 1, n.stages)
            plgpu.barrier_wait(key_full.at[now])
            plgpu.barrier_wait(value_full.at[at])
            plgpu.barrier_arrive(value_free.at[at])
            logits = pl.run_scoped(functools.partial(score, now), room)
            plgpu.barrier_arrive(key_free.at[now])
            return carry[0] + 1, logits

        return lax.while_loop(skipped, go_on, (step, logits))

    room = plgpu.ACC((ROWS, BLOCK), jnp.float32)
    plgpu.barrier_wait(key_full.at[0])
    logits = pl.run_scoped(functools.partial(score, 0), room)
    plgpu.barrier_arrive(key_free.at[0])
    logits, lowest = hide(logits, 0), _filled((ROWS,), -jnp.inf)
    maximum = jnp.maximum(lowest, logits.max(axis=1))
    _, weights = weigh(logits, lowest, maximum, True)
    carry = maximum, weights.sum(axis=1), weights.astype(n.dtype)
    clear = jnp.maximum(steps - lax.div(jnp.minimum(begin, end), BLOCK), 1)  # from this step on all queries see all keys
    carry = add_blocks(jnp.int32(1), clear, True, carry)
    maximum, total, weights = add_blocks(clear, steps, False, carry)
    at = lax.rem(steps - 1, n.stages)
    plgpu.barrier_wait(value_full.at[at])
    plgpu.wgmma(sums, weights, values.at[at])
    held = plgpu.wgmma_accumulator_load(sums)
    out = held * lax.broadcast_in_dim(1 / total, held.shape, [0])
    out = jnp.where(lax.broadcast_in_dim(row < real, held.shape, [0]), out, 0)
    return out, jnp.where(row < real, (maximum * n.scale + jnp.log2(total)) / LOG2_E, -jnp.inf)


def _hide(logits, count):
    """Replace logits [64, N] by -inf behind the first ``count`` [64] of each row.

    A thread compares its two counts with constants. Numbers of columns would be computed once, and wait in registers.
    """
    rows, both = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(both, rows), return_type=plgpu.ShapeDtypeStruct(logits.shape, logits.dtype, layout=both))
    def run(ctx, logits, count):
        thread = t.number(t.ptx("mov.u32 $0, %tid.x;", result=t.i32()), signed=False)
        seen, lowest = [x - t.signed(thread % 4 * 2) for x in t.numbers_of(count)], t.float_number(-jnp.inf)
        registers = np.empty_like(logits.registers)
        for at, pair in np.ndenumerate(logits.registers):
            numbers = (t.number(vector.extract(pair, dynamic_position=[], static_position=[i]), None) for i in (0, 1))
            kept = [(seen[at[4]] > 8 * at[1] + i).select(x, lowest) for i, x in enumerate(numbers)]
            registers[at] = vector.from_elements(pair.type, [t.value(x) for x in kept])
        return mgpu.FragmentedArray(_registers=registers, _layout=logits.layout, _is_signed=None)

    return run(logits, count)


def _any(flags):
    """Tell whether an int32 of the rows of a warpgroup is not 0, by a barrier of its threads: int32."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA.reduce(1),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT),
    )
    def run(ctx, flags):
        both, number = t.numbers_of(flags), mgpu.utils.warpgroup_barrier_idx(sync=False)
        text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; bar.red.or.pred p, $2, 128, p; selp.b32 $0, 1, 0, p; "
        text += "shfl.sync.idx.b32 $0, $0, 0, 31, -1; }"  # so that the assembler knows it is the same in a warp
        return t.number(t.ptx(text, both[0] | both[1], number, result=t.i32()))

    return run(flags)


def _copy(n, steps, end, base, stored, ring):
    """Fill the ring with blocks of keys and values, from the last one back; ``base`` is the row of the list's first slot.

    A block may go on behind the list's last slot, with what is stored there. It ends behind the last token then.
    """
    *tiles, key_full, value_full, key_free, value_free, last = ring

    def load(step, which, full):
        at, slots = lax.rem(step, n.stages), pl.ds(base + (steps - 1 - step) * BLOCK, BLOCK)
        plgpu.copy_gmem_to_smem(stored[which].at[slots], tiles[which].at[at], full, collective_axes="member")

    def next_block(step, _):
        at = lax.rem(step, n.stages)
        for which, (full, free) in enumerate(((key_full, key_free), (value_full, value_free))):
            pl.when(step >= n.stages)(functools.partial(plgpu.barrier_wait, free.at[at]))
            load(step, which, full.at[at])

    cut = steps * BLOCK > end

    @pl.when(steps > 0)
    def _():
        load(0, 0, key_full.at[0])
        pl.when(jnp.logical_not(cut))(lambda: load(0, 1, value_full.at[0]))

    @pl.when((steps > 0) & cut)
    def _():
        load(0, 1, last)
        plgpu.barrier_wait(last)
        _clear(tiles[1].at[0], end - (steps - 1) * BLOCK)
        plgpu.commit_smem()
        plgpu.barrier_arrive(value_full.at[0])

    lax.fori_loop(1, steps, next_block, None)


def _clear(block, count):
    """Overwrite rows from ``count`` on with zeros: a weight of 0 does not silence a NaN."""
    for first in (*range(0, BLOCK - ROWS, ROWS), BLOCK - ROWS):
        for channel in range(0, block.shape[1], 64):
            part = block.at[pl.ds(first, ROWS), pl.ds(channel, 64)]
            held = plgpu.layout_cast(part[...], plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(row + first < count, held, 0).astype(held.dtype)
