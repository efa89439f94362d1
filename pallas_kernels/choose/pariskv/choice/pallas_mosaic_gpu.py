"""Both stages of ParisKV's choice in one kernel for Mosaic GPU: a cluster of programs has a list.

`collision`'s programs vote and list the candidates; then the same programs estimate them as `rerank`'s do. So lists that are
done with voting need not wait for others, and nothing is launched between.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays, assembly, bins
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels.choose.pariskv.collision import pallas_mosaic_gpu as collision
from pallas_kernels.choose.pariskv.rerank import pallas_mosaic_gpu as rerank
from pallas_kernels.choose.pariskv.rerank.lookup import room_for, width_of

DELAY = 0  # cycles between the lists of one multiprocessor


def _later(parts):
    """Wait so that the lists of one multiprocessor are in several phases."""
    late = lax.div(lax.axis_index("x") * parts, jnp.int32(bins.BLOCKS)) * DELAY
    lines = [".reg .pred p; .reg .b32 begun, x; mov.u32 begun, %clock; LATE: mov.u32 x, %clock; sub.s32 x, x, begun;"]
    assembly.run([*lines, "setp.lt.s32 p, x, $0; @p nanosleep.u32 100; @p bra LATE;"], (), [late])


def _body(
    query_ref, counts_ref, shares_ref, ids_ref, position_ref, stop_ref, rows_ref, cursor_ref, limits_ref, *refs,
    votes, best, heads, first, regions, scale, signed,
):  # fmt: skip
    signs_ref, (slots_ref, list_ref, mask_ref, rotated_ref, count_ref, *refs) = refs[:signed], refs[signed:]
    numbers, keys, codes, tally, sums, *places = refs
    if DELAY:
        _later(votes.parts)
    # What votes need in shared memory is where estimates and codes of candidates are later.
    scratch = numbers, keys, codes.at[1], tally, codes.at[0], sums
    wanted = collision.vote(
        query_ref, counts_ref, shares_ref, ids_ref, position_ref, stop_ref, *signs_ref, rotated_ref, slots_ref, count_ref,
        *scratch, n=votes, heads=heads, first=first,
    )  # fmt: skip
    bins.meet_memory(votes.parts)
    rerank.best(
        numbers, slots_ref, lambda: jnp.clip(wanted - best.begin(), 0, best.keys), rows_ref, position_ref, cursor_ref,
        stop_ref, limits_ref, list_ref, mask_ref, keys, codes, tally, sums, *places,
        n=best, regions=regions, heads=heads, scale=scale,
    )  # fmt: skip


def share_of(lists, slots, candidates, dim, parts=None, groups=None):
    """Choose how a list is shared in each stage: by the same programs."""
    both = collision.share_of(lists, slots, parts, groups), rerank.share_of(lists, candidates, dim, parts, groups)
    parts, groups = (max(x) for x in zip(*(x[:2] for x in both), strict=True))
    return collision.share_of(lists, slots, parts, groups), rerank.share_of(lists, candidates, dim, parts, groups)


def choice(
    query, signs, counts, ids, rows, position, cursor, stop, shares, budget, enough, *, first, capacity, regions, scale
):
    """Vote, estimate and list."""
    batch, heads, slots, slices = ids.shape
    (group, dim), lists = query.shape[2:], batch * heads
    votes, best = share_of(lists, slots, capacity, dim)
    limits = jnp.stack([jnp.asarray(x, jnp.int32) for x in (budget, enough)])
    tables, words = slices * collision.HALF // collision.BYTES + 64, (votes.size // collision.BYTES, room_for(best.groups, dim) // 2)
    words = [
        (max(dim // width_of(dim) * best.size, collision.ROOM * votes.threads // 32),), (2, max(tables, *words)),
        (2 * bins.BINS,), (32,),
    ]
    if best.parts > 1 and regions.best <= rerank.FEW:
        words += [(4 * rerank.FEW,), (best.parts * rerank.FEW,)]
    out = (capacity, jnp.int32), (regions.size, jnp.int32), (regions.size, jnp.bool_), (dim, jnp.float32)
    results = arrays.program(
        functools.partial(_body, votes=votes, best=best, heads=heads, first=first, regions=regions, scale=scale, signed=signs is not None),
        [*(jax.ShapeDtypeStruct((lists, size), dtype) for size, dtype in out), jax.ShapeDtypeStruct((lists,), jnp.int32)],
        grid=(lists,),
        parts=votes.parts,
        groups=votes.groups,
        scratch=[plgpu.SMEM((t.THREADS,), jnp.float32), *(plgpu.SMEM(x, jnp.int32) for x in words)],
    )(
        query.reshape(lists, group, dim), counts.reshape(lists, -1), shares, ids.reshape(lists * slots, slices),
        position.reshape(lists, slots), stop, rows.reshape(-1, dim), cursor, limits, *(() if signs is None else (signs,)),
    )  # fmt: skip
    return tuple(x.reshape(batch, heads, -1) for x in results[1:3])
