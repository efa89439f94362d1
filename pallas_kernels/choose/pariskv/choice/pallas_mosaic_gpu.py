"""Both stages of ParisKV's choice in one kernel for Mosaic GPU: a cluster of programs has a list.

The programs that vote for a list estimate its candidates. So a list that is done with voting waits for no other list, and
nothing is launched between the stages.
"""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels._mosaic_gpu import arrays, bins
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels.choose.pariskv.choice import best as stage_two
from pallas_kernels.choose.pariskv.choice import vote as stage_one
from pallas_kernels.choose.pariskv.choice.lookup import room_for, width_of
from pallas_kernels.formats.key_codes import SLICE
from pallas_kernels.machine import current_machine

MOST = 8 * stage_one.MOST_KEYS
TAKES = f"{arrays.HOPPER}, D of 32, 64 or 128, lists of up to {MOST} slots"


def _body(
    query_ref, counts_ref, shares_ref, ids_ref, position_ref, stop_ref, rows_ref, cursor_ref, limits_ref, *refs,
    votes, best, heads, first, regions, scale, signed,
):  # fmt: skip
    # The candidates are in global memory, so that the programs of a cluster share them evenly. In shared memory what votes
    # need is where estimates and codes of candidates are later.
    signs_ref, (slots_ref, list_ref, mask_ref, numbers, keys, codes, tally, sums, *places) = refs[:signed], refs[signed:]
    count = stage_one.vote(
        query_ref, counts_ref, shares_ref, ids_ref, position_ref, stop_ref, signs_ref, slots_ref,
        numbers, keys, codes.at[1], tally, codes.at[0], sums, n=votes, heads=heads, first=first,
    )  # fmt: skip
    bins.meet_memory(votes.parts)
    stage_two.best(
        numbers, slots_ref, count, rows_ref, position_ref, cursor_ref, stop_ref, limits_ref, list_ref, mask_ref,
        keys, codes, tally, sums, *places, n=best, regions=regions, heads=heads, scale=scale,
    )  # fmt: skip


def share_of(lists, slots, candidates, dim, parts=None, groups=None):
    """Choose how a list is shared in each stage: by the same programs."""

    def stages(*given):
        return stage_one.share_of(lists, slots, *given), stage_two.share_of(lists, candidates, dim, *given)

    return stages(*(max(x) for x in zip(*(x[:2] for x in stages(parts, groups)), strict=True)))


def choice(
    query, signs, counts, ids, rows, position, cursor, stop, shares, budget, enough, *, first, capacity, regions, scale
):
    """Vote, estimate and list."""
    batch, heads, slots, slices = ids.shape
    (group, dim), lists = query.shape[2:], batch * heads
    votes, best = share_of(lists, slots, capacity, dim)
    limits = jnp.stack([jnp.asarray(x, jnp.int32) for x in (budget, enough)])
    tables = slices * stage_one.HALF // stage_one.BYTES + 64
    sizes = [
        (max(dim // width_of(dim) * best.size, stage_one.ROOM * votes.threads // 32),),
        (2, max(tables, votes.size // stage_one.BYTES, room_for(best.groups, dim) // 2)), (2 * bins.BINS,), (32,),
    ]  # fmt: skip
    if best.parts > 1 and regions.best <= stage_two.FEW:
        sizes += [(4 * stage_two.FEW,), (best.parts * stage_two.FEW,)]
    out = (capacity, jnp.int32), (regions.size, jnp.int32), (regions.size, jnp.bool_)
    signs = () if signs is None else (signs,)
    _, *results = arrays.program(
        functools.partial(
            _body, votes=votes, best=best, heads=heads, first=first, regions=regions, scale=scale, signed=len(signs)
        ),
        [jax.ShapeDtypeStruct((lists, size), dtype) for size, dtype in out],
        grid=(lists,),
        parts=votes.parts,
        groups=votes.groups,
        scratch=[plgpu.SMEM((t.THREADS,), jnp.float32), *(plgpu.SMEM(x, jnp.int32) for x in sizes)],
    )(
        query.reshape(lists, group, dim), counts.reshape(lists, -1), shares, ids.reshape(lists * slots, slices),
        position.reshape(lists, slots), stop, rows.reshape(-1, dim), cursor, limits, *signs,
    )  # fmt: skip
    return tuple(x.reshape(batch, heads, -1) for x in results)


def check(
    query, signs, counts, ids, rows, position, cursor, stop, shares, budget, enough, *, first, capacity, regions, scale
):
    """Raise ``NotImplementedError`` for other GPUs and sizes that the kernel does not take."""
    arrays.check_hopper()
    arrays.check_floats(query)
    slots, dim, most = position.shape[2], query.shape[3], 8 * stage_two.most_of(query.shape[3])
    tiers, slices = shares.shape[1] - 2, dim // SLICE
    if dim not in (32, 64, 128):
        raise NotImplementedError(f"got head_dim {dim}, expected 32, 64 or 128")
    if tiers > stage_one.MOST_VOTES or tiers * slices > bins.BINS - 2:
        raise NotImplementedError(f"got {tiers} tiers and {slices} slices, expected at most {bins.BINS - 2} votes")
    if not 1 <= slots <= MOST or not 1 <= capacity <= most or rows.size // dim // slots * max(slots, capacity) >= 2**31:
        raise NotImplementedError(f"got {slots} slots and room for {capacity}, expected 1 to {MOST} and to {most}")
    if not regions.size <= slots:
        raise NotImplementedError(f"got {regions}, expected a list of at most {slots}")


def first(query, signs, counts, ids, *_, **__):
    """Tell whether lists of one program or two fill the multiprocessors: then Triton's five kernels take longer."""
    batch, heads, slots, _ = ids.shape
    lists = 2 * batch * heads
    return current_machine().capability == (9, 0) and lists >= bins.BLOCKS - 4 and slots <= stage_one.MOST_KEYS
