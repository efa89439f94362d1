"""Estimates of the candidates through Mosaic GPU, which `kth_select` chooses from, and a kernel that writes the list.

D / 16 threads share a candidate: each has two slices of its row, 16 bytes, and 16 channels of the query.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.pallas import arith, ir, mgpu, plgpu
from pallas_kernels.choose.kth_select import pallas_mosaic_gpu as kth_kernel
from pallas_kernels.choose.pariskv.rerank.products import PACK, program
from pallas_kernels.formats.key_codes import LEVEL

STEPS = 4  # candidates of a thread
MOST = 2**13  # entries of a list, in registers
LEAST = float(jnp.finfo(jnp.float32).min)
TAKES = f"{arrays.HOPPER}, D of 32 to 256, lists of up to {MOST} slots"


def _estimates(query, rows, line, row, dim):
    """Multiply the query of a line [L, D] with the coded ``row`` int32 [N] of rows [L * S, D]: float32 [N]."""
    ref, own, lanes = plgpu.RefType(), t.own(row.shape[0] // t.THREADS), dim // PACK

    @plgpu.inline_mgpu(
        arg_types=(ref, ref, plgpu.Layout.WG_SPLAT, own),
        return_type=plgpu.ShapeDtypeStruct(row.shape, jnp.float32, layout=own),
    )
    def run(ctx, query, rows, line, row):
        channel, f32, found = t.signed(t.thread() % lanes) * PACK, jnp.dtype(jnp.float32), []
        place = t.at(t.address(query), t.element(t.number(t.value(line)), dim, channel), 4)
        heads = [x for i in range(0, PACK, 4) for x in t.load_some(t.at(place, t.number(i), 4), f32, 4)]
        places = [t.at(t.address(rows), t.element(x, dim, channel), 1) for x in t.numbers_of(row)]
        for words in [t.load_words(x, 0, 4) for x in places]:  # all are loaded before anything is multiplied
            operands = [t.value(x) for x in (*words, *heads)]
            bits = mgpu.utils.inline_ptx(program(1), *operands, result_types=t.i32())
            total, distance = t.number(arith.bitcast(ir.F32Type.get(), bits), None), lanes // 2
            while distance:
                total, distance = total + t.shuffle(total, distance), distance // 2
            found.append(total)
        return t.made_of(found, floats=True)

    return run(query, rows, line, row)


def _body(query_ref, slots_ref, count_ref, rows_ref, out_ref, *, slots, dim, scale):
    # query [L, D]; slots [L, C]; count [L]; rows [L * S, D]; out [L, C].
    line, lanes, candidates = lax.axis_index("x"), dim // PACK, slots_ref.shape[1]
    entry = arrays.counted(t.THREADS * STEPS)
    number, thread = lax.shift_right_logical(entry, 7), entry & (t.THREADS - 1)
    each = t.THREADS // lanes
    at = lax.axis_index("y") * (STEPS * each) + number * each + lax.div(thread, lanes)
    live = at < jnp.minimum(arrays.scalar(count_ref, line), candidates)
    slot = jnp.clip(arrays.load(slots_ref, jnp.where(live, line * candidates + at, -1)), 0, slots - 1)
    total = _estimates(query_ref, rows_ref, line, line * slots + slot, dim) * (scale * LEVEL)
    total = jnp.where(total == 0, 0.0, total)
    total = jnp.where(total < LEAST, LEAST, total)  # NaN stays, and is never chosen
    mine = (at < candidates) & (lax.rem(thread, lanes) < 1)
    arrays.store(out_ref, jnp.where(mine, line * candidates + at, -1), jnp.where(live, total, -jnp.inf))


def estimates(query, slots, count, rows, *, scale):
    """Estimate the product of the query with each candidate."""
    (batch, heads, candidates), (stored, dim) = slots.shape, rows.shape[2:]
    lists, each = batch * heads, STEPS * t.THREADS // (dim // PACK)
    (out,) = arrays.program(
        functools.partial(_body, slots=stored, dim=dim, scale=scale),
        [jax.ShapeDtypeStruct((lists, candidates), jnp.float32)],
        grid=(lists, -(-candidates // each)),
    )(query.reshape(lists, dim), slots.reshape(lists, candidates), count.reshape(-1), rows.reshape(lists * stored, dim))
    return out.reshape(slots.shape)


def _body_list(
    best_ref, count_ref, slots_ref, position_ref, cursor_ref, stop_ref, enough_ref, list_ref, mask_ref, *, heads, regions
):
    # best [L, K], entries of slots [L, C], of which count [L] are chosen; position [L, S]; cursor, stop [B]; enough [1]; list
    # and mask [L, size].
    line, (most, stored) = lax.axis_index("x"), (slots_ref.shape[1], position_ref.shape[1])
    cursor, stop = (arrays.scalar(ref, lax.div(line, heads)) for ref in (cursor_ref, stop_ref))
    dense = (cursor < arrays.scalar(enough_ref, line * 0)) | (stop <= regions.sinks)
    at = arrays.counted(arrays.size_of(regions.size))
    number = at - regions.sinks
    chosen = (number >= 0) & (number < regions.best)
    found = chosen & (number < arrays.scalar(count_ref, line)) & ~dense
    entry = arrays.load(best_ref, jnp.where(found, line * regions.best + number, -1))
    best = arrays.load(slots_ref, jnp.where(found, line * most + entry, -1))
    behind = number - regions.best
    slot = jnp.where(behind >= 0, stop + behind, at)
    slot = jnp.where(dense, at, jnp.where(chosen, best, slot))
    listed = dense | found | ((at < regions.sinks) | ((behind >= 0) & (behind < regions.tail)))
    listed = listed & (slot < cursor)
    slot = jnp.clip(slot, 0, stored - 1)
    where, listed = jnp.where(at < regions.size, line * regions.size + at, -1), listed & (at < regions.size)
    held = arrays.load(position_ref, jnp.where(listed, line * stored + slot, -1), -1) >= 0
    arrays.store(list_ref, where, slot)
    arrays.store(mask_ref, where, held.astype(jnp.int32))


def rerank(query, slots, count, rows, position, cursor, stop, budget, enough, *, regions, scale):
    """List the best candidates by estimate between the first and the last slots."""
    lists = slots.shape[0] * slots.shape[1]
    score = estimates(query, slots, count, rows, scale=scale)[:, :, None]
    best, _, found = kth_kernel.kth_select(score, budget, regions.best)
    operands = [x.reshape(lists, -1) for x in (best, slots, position)]
    listed, mask = arrays.program(
        functools.partial(_body_list, heads=slots.shape[1], regions=regions),
        [jax.ShapeDtypeStruct((lists, regions.size), dtype) for dtype in (jnp.int32, jnp.bool_)],
        grid=(lists,),
    )(operands[0], found.reshape(-1), *operands[1:], cursor, stop, jnp.asarray(enough, jnp.int32).reshape(1))
    return tuple(x.reshape(*slots.shape[:2], -1) for x in (listed, mask))


def check(query, slots, count, rows, position, cursor, stop, budget, enough, *, regions, scale):
    """Raise ``NotImplementedError`` for sizes that the kernels do not take."""
    check_estimates(query, slots, count, rows, scale=scale)
    score = jax.ShapeDtypeStruct((*slots.shape[:2], 1, slots.shape[2]), jnp.float32)
    if not regions.size <= min(position.shape[2], MOST):
        raise NotImplementedError(f"got {regions}, expected a list of at most {min(position.shape[2], MOST)}")
    kth_kernel.check(score, budget, regions.best)


def check_estimates(query, slots, count, rows, *, scale):
    """Raise ``NotImplementedError`` for sizes that the kernel of estimates does not take."""
    arrays.check_hopper()
    dim = query.shape[-1]
    if dim not in (32, 64, 128, 256) or not slots.size or max(rows.size // dim, slots.size) >= 2**31:
        raise NotImplementedError(f"got rows {rows.shape} and slots {slots.shape}, expected head_dim 32 to 256")
