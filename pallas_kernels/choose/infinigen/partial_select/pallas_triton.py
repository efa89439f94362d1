"""The tokens that InfiniGen attends to, as three Pallas Triton kernels for long rows.

1. ``partial_score``, the first kernel of the operation of this name: logits, scores, and maxima of scores.
2. ``partial_filter``, grid (B * H, segments + parts): the first programs list the entries of a segment that may be chosen,
   as the kernel ``filter`` of `pallas_kernels.choose.kth_select` does, from the most entries that can be wanted. The last
   programs count the logits near the largest, as the second kernel of `partial_score` does. Both kinds run at the same time:
   the first programs mostly wait, and the last programs mostly read.
3. ``partial_choose``, a program per list: now it is known how many are wanted, and the best of the entries are listed.

Short rows run the kernels of both operations.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.block_specs import of_list, whole
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl
from pallas_kernels.choose.infinigen.partial_select.reference import wanted
from pallas_kernels.choose.kth_select import pallas_triton as kth
from pallas_kernels.score.infinigen.partial_score import pallas_triton as scores


def _filter(*refs, block, blocks, segments, **static):
    # Of one list: logits [G, N]; most [blocks, G]; score [N]; node [M]. Of all: alpha, budget [1]. Of the row: near [1],
    # before and after, in the same memory. Results of the list: see `kth.list_candidates`.
    logits_ref, most_ref, score_ref, node_ref, alpha_ref, budget_ref, _, near_ref, *refs = refs
    program = pl.program_id(1)

    @pl.when(program < segments)
    def _():
        most = [jnp.maximum(budget_ref[0], 0) + 1]
        kth.list_candidates(program, score_ref, node_ref, most, *refs, budget=None, **static)

    @pl.when(program >= segments)
    def _():
        first = (program - segments) * blocks
        last = jnp.minimum(first + blocks, most_ref.shape[0])
        near = scores.count_near(logits_ref, most_ref, alpha_ref[0], first, last, block)
        jax.ref.addupdate(near_ref, (0,), near)


def _choose(near_ref, count_ref, budget_ref, *refs, query_heads, **static):
    # Of the row: near [1]. Of the list: count [P]. Of all: budget [1]. Other refs: see `kth.choose`.
    number = wanted(near_ref[0], scores.stored_of(count_ref), budget_ref[0], query_heads)
    kth.choose(*refs[:4], [number], *refs[4:], budget=None, **static)


def partial_select(
    query,
    key,
    position,
    cursor,
    alpha,
    budget,
    *,
    scale,
    capacity,
    total,
    query_heads,
    config: scores.Config | None = None,
    chosen: kth.Config | None = None,
    interpret=False,
):
    """List the newest token and the best others by their partial keys; ``interpret=True`` runs anywhere, slowly."""
    config, chosen = config or scores.Config(), chosen or kth.Config()
    slots, given = position.shape[2], (query, key, position, cursor)
    if kth.is_direct(slots, capacity, chosen):
        own = {"scale": scale, "config": config, "interpret": interpret}
        score, near, stored = scores.partial_score(*given, alpha, **own)
        number = wanted(total(near)[:, None], stored, budget, query_heads)
        return kth.kth_select(score, number, capacity, config=chosen, interpret=interpret)[:2]
    (batch, heads), block = query.shape[:2], config.block_of(query.shape[2])
    chosen = chosen.filled(capacity)
    chosen = dataclasses.replace(chosen, tile=max(chosen.tile, block))
    # Half as many maxima again as entries are wanted: the filter of every program searches all of them.
    least = chosen.nodes // 2 if 3 * capacity // 2 <= chosen.nodes // 2 else chosen.nodes
    made = scores.score_blocks(*given, scale=scale, config=config, wanted=least, interpret=interpret)
    logits, score, most, count, near, node = (x if x.ndim == 1 else x.reshape(-1, *x.shape[2:]) for x in made)
    lists, room, budget = batch * heads, score.shape[1], jnp.reshape(budget, (1,)).astype(jnp.int32)
    steps, segments = kth.stretches(lists, room, chosen)
    blocks = pl.cdiv(most.shape[1], max(1, chosen.programs // 2 // lists))  # of a program that counts
    parts, most_listed = pl.cdiv(most.shape[1], blocks), min(capacity, slots)
    shapes = [(lists, segments), (lists, 2), *[(lists, segments * steps * chosen.tile)] * 2]
    found = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    given, alpha = (logits, most, score, node), alpha.reshape(1)
    of_row = pl.BlockSpec((1,), lambda i, *_: (i // heads,))
    near, *candidates = triton_call(
        functools.partial(
            _filter,
            block=block,
            blocks=blocks,
            segments=segments,
            most=most_listed,
            slots=room,
            tile=chosen.tile,
            steps=steps,
        ),
        grid=(lists, segments + parts),
        in_specs=[*(of_list(x, 1) for x in given), whole(alpha), whole(budget), of_row],
        out_specs=[of_row, *(of_list(x, 1) for x in found)],
        out_shape=[jax.ShapeDtypeStruct(near.shape, near.dtype), *found],
        input_output_aliases={6: 0},
        num_warps=chosen.warps[1],
        interpret=interpret,
        name="partial_filter",
    )(*given, alpha, budget, near)
    outs = [((lists, capacity), jnp.int32), ((lists, capacity), jnp.bool_), ((lists, 1), jnp.int32)]
    outs = [jax.ShapeDtypeStruct(*x) for x in outs] + found[2:]
    listed, keep, *_ = triton_call(
        functools.partial(
            _choose, query_heads=query_heads, most=most_listed, tile=chosen.hold, segments=segments, interpret=interpret
        ),
        grid=(lists,),
        in_specs=[of_row, of_list(count, 1), whole(budget), *(of_list(x, 1) for x in candidates)],
        out_specs=[of_list(x, 1) for x in outs],
        out_shape=outs,
        num_warps=chosen.warps[2],
        interpret=interpret,
        name="partial_choose",
    )(total(near), count, budget, *candidates)
    return listed.reshape(batch, heads, -1), keep.reshape(batch, heads, -1)


def check(query, key, position, cursor, alpha, budget, *, scale, capacity, total, query_heads):
    """Raise ``NotImplementedError`` for dtypes and sizes that the kernels do not take."""
    scores.check(query, key, position, cursor, alpha, scale=scale)
    kth.check(jax.ShapeDtypeStruct(position.shape, jnp.float32), None, capacity)
