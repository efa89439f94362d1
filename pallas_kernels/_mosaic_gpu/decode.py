"""Decode attention on NVIDIA GPUs from Ampere on, where each warp attends alone.

A warp takes 16 entries of a list at a time. It copies their keys and values by `cp.async` into a ring of its own in shared
memory, some steps ahead, multiplies them by the query with `mma`, and keeps the sums in registers. No warp waits for another
one until the end. There the warps of a block join their sums, and then the blocks that share a list, which are a cluster:
each merges a part of the output out of the shared memory of all. Nothing else is launched, and no partial result reaches
global memory, but for lists so long that several clusters share one.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu.pallas import pl, plgpu
from pallas_kernels._mosaic_gpu.sizes import LINE, ROWS, Lists, Sizes
from pallas_kernels._mosaic_gpu.steps import copier, meet_block, merger, multiplier
from pallas_kernels._triton.quantised import check_codes
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.host import Rows
from pallas_kernels.machine import current_machine

# How many clusters of 1, 2, ... 8 programs an H200 runs at once (cudaOccupancyMaxActiveClusters). A cluster lies within a
# part of the GPU that has 18 multiprocessors or fewer, so 16 clusters of 8 would be two rounds.
ROOM = (132, 66, 39, 30, 22, 17, 15, 15)
ALONE = (108,)  # multiprocessors of an A100, which has no clusters
MOST_CLUSTERS = 16  # of a list
MANY = 128  # lists, with which an H200 is full
MOST_ROWS = 64  # of a query
JOIN = 2  # blocks that a program reads in the time of the launch that joins clusters


def check_machine(query: Any, key: Any, value: Any, rows: Rows | None = None) -> None:
    """Raise ``NotImplementedError`` for machines, dtypes and shapes that `attend` does not take."""
    if not (machine := current_machine()).has_kernels:
        raise NotImplementedError(f"got {machine}, expected an NVIDIA GPU of compute capability 8.0 or above")
    check_codes(key, value, rows=rows)
    kinds = [x.kind if isinstance(x, Quantised) else None for x in (key, value)]
    if kinds[0] != kinds[1]:
        raise NotImplementedError(f"got keys in {kinds[0]} and values in {kinds[1]}, expected the same")
    dtypes = {str(x.dtype) for x in (query, key, value)}
    if dtypes not in ({"bfloat16"}, {"float16"}):
        raise NotImplementedError(f"got dtypes {sorted(dtypes)}, expected bfloat16 or float16 for all")
    if key.shape[3] != value.shape[3] or key.shape[3] not in (64, 128, 256):
        raise NotImplementedError(f"got keys {key.shape} and values {value.shape}, expected head_dim 64, 128 or 256 of both")
    _, heads, slots, dim = key.shape
    if Sizes(heads=heads, group=1, dim=dim, slots=slots, dtype=key.dtype, shared=machine.shared_memory).stages < 2:
        raise NotImplementedError(f"got head_dim {dim} on {machine}, expected less, for its shared memory")
    if math.prod(query.shape[2:-1]) > MOST_ROWS or not slots:
        raise NotImplementedError(
            f"got {query.shape[2:-1]} query heads or queries, expected at most {MOST_ROWS} in all, and slots"
        )


def many_lists(query: jax.Array) -> bool:
    """Tell whether each program has a list of its own, so that nothing is merged as behind Triton's parts of lists."""
    return current_machine().capability == (9, 0) and math.prod(query.shape[:2]) >= MANY


def default_programs(lists: int, blocks: int) -> tuple[int, int]:
    """Choose how many programs a cluster has and how many clusters a list, so that all run at once and end soonest."""

    def rounds(work: tuple[int, int]) -> tuple[int, int]:
        splits, clusters = work
        return -(-blocks // (splits * clusters)) + (JOIN if clusters > 1 else 0), clusters

    room = ROOM if current_machine().capability >= (9, 0) else ALONE
    sizes = [(i + 1, n) for i, most in enumerate(room) for n in range(1, MOST_CLUSTERS + 1) if lists * n <= most]
    return min([(1, 1), *sizes], key=rounds)


def divided(n: Sizes, lists: int, entries: int, programs: tuple[int, int] | None) -> Sizes:
    """Divide lists among programs: of 2 warpgroups if these read a sixteenth less than those of 3, else of 3."""

    def read(most: int) -> tuple[int, Sizes]:
        sizes = dataclasses.replace(n, most=most)
        splits, clusters = programs or default_programs(lists, -(-entries // sizes.block))
        rounds = -(-entries // (sizes.block * splits * clusters))
        return rounds * sizes.block, dataclasses.replace(sizes, splits=splits, clusters=clusters)

    (many, wide), (few, narrow) = read(3), read(2)
    return narrow if 16 * few < 15 * many else wide


def _body(n: Sizes, lists: Lists, scale: float, sizes: tuple[int, ...], out_dtype: Any, beside_dtype: Any):
    """Return the kernel over refs: query, key, value; if any, positions, parts beside, lists, scales, frequencies, host."""

    def body(query_ref, key_ref, value_ref, *refs):
        *refs, ring, keys, values, full, free = (*refs, *(None,) * (4 * (not n.tiled)))
        refs, logits = (refs[:-1], tuple(refs[-1:])) if n.logits else (refs, ())
        *refs, out_ref, lse_ref = refs
        ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
        position, asked_ref, beside, listed, scales, turning, host = (tuple(refs[i:j]) for i, j in itertools.pairwise(ends))
        base, cluster = lax.axis_index("list"), lax.axis_index("cluster")
        split = lax.axis_index("split") if n.splits > 1 else 0 * base  # older cards have no clusters
        programs, program = n.clusters * n.splits, cluster * n.splits + split
        b, h = lax.div(base, n.heads), lax.rem(base, n.heads)
        entries, scalars = lists.entries(listed, b, h)
        blocks, number = lax.div(entries + (n.block - 1), n.block), _same
        if lists.block_number is not None:
            blocks, number = lists.block_number(listed, b, h, blocks, n.block)

        def steps_of(blocks):
            return lax.div(blocks - program + (programs - 1), programs)

        steps = steps_of(blocks)
        many = 0 if not beside else beside[1].shape[2] if len(beside[1].shape) > 3 else 1
        publish, merge = merger(n, out_dtype, many, beside_dtype)

        def start(step):
            return number(step * programs + program) * n.block

        def run():
            stored, ahead = ((key_ref, value_ref), position, scales, host), n.stages - 1
            fetch, copy, arrive = copier(n, lists, bool(position))
            load_query, load_asked, load_frequencies, begin, add = multiplier(n, scale, lists.biased)

            def follow(step, carry):
                loaded, state = carry
                arrive()
                later, stage = step + ahead, lax.rem(step, n.stages)
                copy(stored, ring, loaded, (start(later), *scalars), base, lax.rem(later, n.stages))
                loaded = fetch(listed, (start(later + 1), *scalars))
                if n.tiled:
                    plgpu.barrier_wait(full.at[stage])
                where = (base, start(step)) if n.logits else ()
                state = add((ring, *(keys, values) * n.tiled), query, asked, inv_freq, state, stage, logits, where)
                if n.tiled:
                    plgpu.barrier_arrive(free.at[stage])
                return loaded, state

            *first, loaded = [fetch(listed, (start(jnp.int32(i)), *scalars)) for i in range(n.stages)]
            query = load_query(query_ref, base)
            asked = (load_asked(asked_ref[0], b),) if n.queries else ()
            inv_freq = tuple(map(load_frequencies, turning))
            for i, x in enumerate(first):
                copy(stored, ring, x, (start(jnp.int32(i)), *scalars), base, jnp.int32(i))
            reading = steps
            if lists.live is not None:  # known when the first copies are on their way
                reading = jnp.minimum(steps, steps_of(lax.div(lists.live(listed, b, h) + (n.block - 1), n.block)))
            _, sums = lax.fori_loop(0, reading, follow, (loaded, begin()))
            if n.tiled:
                meet_block()
            publish(room, *sums)

        def load(step, _):
            """Have the copy engine bring a block, when all warps have read what is in its place."""
            stage = lax.rem(step, n.stages)
            pl.when(step >= n.stages)(lambda: plgpu.barrier_wait(free.at[stage]))
            rows, channels = pl.ds(base * n.slots + start(step), n.block), n.dim // n.lines
            for (ref, tile), i in itertools.product(((key_ref, keys), (value_ref, values)), range(n.lines)):
                part = ref.at[rows, pl.ds(i * channels, channels)]
                plgpu.copy_gmem_to_smem(part, tile.at[stage, i], full.at[stage])

        if n.tiled:
            room, team = keys, lax.axis_index("warpgroup")

            @pl.when(team == n.warpgroups)
            def _():
                plgpu.set_max_registers(24, action="decrease")
                lax.fori_loop(0, steps, load, None)
                meet_block()

            @pl.when(team < n.warpgroups)
            def _():
                plgpu.set_max_registers(240, action="increase")
                run()
        else:
            room = ring
            run()
        meet_block()
        merge((room,), out_ref, lse_ref, beside, (base, cluster, split))

    return body


def _same(step):
    return step


def attend(
    query: jax.Array, key: jax.Array | Quantised, value: jax.Array | Quantised, lists: Lists, *, entries: int, scale: float,
    position: jax.Array | None = None, query_position: jax.Array | None = None,
    beside: tuple[jax.Array, jax.Array] | None = None, parts: bool = False, programs: tuple[int, int] | None = None,
    inv_freq: jax.Array | None = None, logits: bool = False, first: int = 0,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Attend to the rows of lists.

    Args:
        query: [B, H, R, D], where R is G, or G * T in the order of heads with ``query_position``.
        key: [B, H, S, D], or codes of 8 bits; copies of some rows where ``lists`` have the others.
        value: like ``key``.
        lists: which rows.
        entries: the most entries of a list.
        scale: factor of the logits.
        position: int32 [B, H, S]; slots at negative positions do not enter. None: all listed slots do.
        query_position: int32 [B, T]; a query sees the positions that are not after its own.
        beside: N parts of attention to something else, [B, H, N, R, D] and float32 [B, H, N, R]; or N = 1 without the axis.
        parts: True: the result is in parts, one of each cluster.
        programs: of a cluster, and clusters of a list; None chooses.
        inv_freq: float32 [D / 2], radians per place; where ``lists`` tell places of keys.
        logits: True: the result has the logits to base 2, too; each entry is a slot, and R * D at most `ROWS`.
        first: the first row of the query among those that share ``query_position``.

    Returns:
        out [B, H, R, D] and lse float32 [B, H, R]; with ``parts`` float32 [B, H, N, R, D] and [B, H, N, R]. With ``logits``
        also float32 [B, H, R, S], which may be anything where a slot is not read or does not enter.
    """
    batch, heads, group, dim = query.shape
    queries = 0 if query_position is None else query_position.shape[1]
    if group > (most := max(8, ROWS // dim)):  # the cache is read once for each part of the query
        done = []
        for i in range(0, group, most):
            some = beside and (beside[0][..., i : i + most, :], beside[1][..., i : i + most])
            options = {"position": position, "query_position": query_position, "beside": some, "parts": parts}
            options |= {"inv_freq": inv_freq}
            part = query[:, :, i : i + most]
            done.append(
                attend(part, key, value, lists, entries=entries, scale=scale, **options, programs=programs, first=first + i)
            )
        return tuple(jnp.concatenate(x, axis=-i) for i, x in zip((2, 1), zip(*done, strict=True), strict=True))
    shape = {"heads": heads, "group": group, "dim": dim, "queries": queries, "first": first}
    shape |= {"slots": (key if lists.host is None else lists.host).shape[2]}
    scales, kind = (), None
    if isinstance(key, Quantised):
        kind, scales, key, value = key.kind, (key.scale, value.scale), key.codes, value.codes
    n = Sizes(**shape, logits=logits, kind=kind, dtype=query.dtype, shared=current_machine().shared_memory)
    tiled = dataclasses.replace(n, tiled=True)
    if lists.tiled and tiled.fits and not n.width % LINE and (9, 0) <= current_machine().capability < (12, 0):
        n, key, value = tiled, *(x.reshape(-1, dim) for x in (key, value))
    n = divided(n, batch * heads, entries, programs)
    given = position, query_position, beside, lists.operands, scales, inv_freq, lists.host
    groups = [() if x is None else x if isinstance(x, tuple) else (x,) for x in given]
    apart = parts or n.clusters > 1
    lead, made = (batch, heads, *(n.clusters,) * apart), jnp.float32 if apart else query.dtype
    out, lse, *more = _kernel(
        _body(n, lists, scale, tuple(map(len, groups)), made, beside and beside[0].dtype),
        lead + (group, dim),
        made,
        [jax.ShapeDtypeStruct((batch, heads, group, n.slots), jnp.float32)] * logits,
        scratch_types=[plgpu.SMEM((n.memory // 4,), jnp.int32), *(_tiles(n, key.dtype) if n.tiled else ())],
        grid=(batch * heads, n.clusters),
        grid_names=("list", "cluster"),
        **({"cluster": (n.splits,), "cluster_names": ("split",)} if n.splits > 1 else {}),
        num_threads=n.warpgroups + n.tiled,
        thread_name="warpgroup",
    )(query, key, value, *(x for group in groups for x in group))
    if parts or n.clusters == 1:
        return out, lse, *more

    def join(out_ref, lse_ref, joined_ref, joined_lse_ref):
        one = dataclasses.replace(n, clusters=1)
        _, merge = merger(one, query.dtype, n.clusters, jnp.float32, joining=True)
        base = lax.axis_index("list")
        merge((), joined_ref, joined_lse_ref, (out_ref, lse_ref), (base, base * 0, base * 0))

    joined = _kernel(join, query.shape, query.dtype, grid=(batch * heads,), grid_names=("list",))(out, lse)
    return *joined, *more


def _tiles(n, dtype):
    """List the shared memory of tiles of keys and of values, and barriers that tell when they are full and free."""
    tiles = plgpu.SMEM((n.stages, n.lines, n.block, n.dim // n.lines), dtype, transforms=(plgpu.SwizzleTransform(LINE),))
    full = plgpu.Barrier(num_arrivals=2 * n.lines, num_barriers=n.stages)
    return tiles, tiles, full, plgpu.Barrier(num_arrivals=n.warpgroups, num_barriers=n.stages)


def _kernel(body, shape, dtype, more=(), **options):
    """Make a kernel whose results are out of a shape and dtype, lse float32, and ``more``."""
    lane = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    made = [jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:-1], jnp.float32), *more]
    return plgpu.kernel(body, out_type=made, compiler_params=lane, **options)
