"""Estimates of the candidates and the list of a decode step as two Pallas Triton kernels.

1. Estimates, programs over candidates: a candidate's codes are gathered as two rows, its 4-bit levels are looked up in a
   table of 16 numbers that never leaves the first-level cache. Where candidates are many, a program takes more of them
   and passes on only as many as the list has room for.
2. The list, one program per list: threshold search over what is left, all of it in registers.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.encode.reference import LEVEL, SLICE
from pallas_kernels.kth_select.search import LOWEST, NEVER, find, order_key, rank
from pallas_kernels.rerank.reference import SIGNED_LEVELS
from pallas_kernels.triton_call import triton_call

MOST_ENTRIES = 1 << 13  # that one program holds in registers


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut; sizes are powers of two.

    Attributes:
        part: candidates estimated at once, at least 16.
        parts: of one program, which passes on no more than the list has room for.
        num_warps: warps per program of the estimates.
    """

    part: int = 128
    parts: int = 1
    num_warps: int = 4

    def __post_init__(self):
        if self.part < 16 or self.part & (self.part - 1) or self.parts < 1 or self.parts & (self.parts - 1):
            raise ValueError(f"rerank: got {self}, expected powers of two, part at least 16")


def default_config(candidates: int, best: int) -> Config | None:
    """The least parts per program that leave few enough entries for one program; None if there are none."""
    for config in (Config(), Config(256, 1, 8), Config(256, 2, 8), Config(256, 4, 8), Config(128, 16, 8)):
        if _programs(config, candidates) * _passed(config, best) <= MOST_ENTRIES:
            return config
    return None


def _programs(config: Config, candidates: int) -> int:
    return pl.cdiv(candidates, config.part * config.parts)


def _passed(config: Config, best: int) -> int:
    """Entries that a program passes on."""
    return min(config.part * config.parts, pl.next_power_of_2(best))


def _best(key, wanted):
    """Which of the keys int32 [E] are among the ``wanted`` best, where each goes, and how many they are."""
    may = key > NEVER
    held = jnp.sum(may.astype(jnp.int32), dtype=jnp.int32)
    low = jnp.min(jnp.where(may, key, 2**31 - 2))
    high = jnp.maximum(jnp.max(key), low) + 1

    def count(pivot):
        return jnp.sum((key >= pivot).astype(jnp.int32), dtype=jnp.int32)

    def below(pivot):
        return jnp.max(jnp.where(key < pivot, key, NEVER))

    chosen = jnp.minimum(held, wanted)
    threshold, reach, over = find(count, below, low, high, held, jnp.maximum(chosen, 1), 0)
    ties = jnp.where(reach > chosen, chosen - over, reach)
    keep, place, _, _ = rank(key, threshold, ties, jnp.int32(0), jnp.int32(0))
    return keep & (place < chosen), place, chosen


def _estimate_kernel(
    query_ref, levels_ref, slots_ref, count_ref, limits_ref, magnitudes_ref, weight_ref, *out, config, scale
):
    """Query [D]; slots [C]; magnitudes [S, D/2] and weight [S, N] of a list; out: keys, and slots where only some pass."""
    b, h, program = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    stored, packed = magnitudes_ref.shape
    slices, count, size = weight_ref.shape[1], count_ref[b, h], config.part * config.parts
    pair = jnp.arange(packed, dtype=jnp.int32) * 2
    even, odd = query_ref[pair][None, :], query_ref[pair + 1][None, :]

    def entries(first, number):
        entry = first + jnp.arange(number, dtype=jnp.int32)
        slot = slots_ref[jnp.minimum(entry, slots_ref.shape[0] - 1)]
        return entry < count, jnp.where(entry < count, jnp.clip(slot, 0, stored - 1), 0)

    def keys(step):
        live, slot = entries(program * size + step * config.part, config.part)
        codes = magnitudes_ref[slot, :].astype(jnp.int32)
        products = levels_ref[codes & 15] * even + levels_ref[codes >> 4] * odd
        dots = jnp.sum(products.reshape(config.part, slices, SLICE // 2), axis=2)
        total = jnp.sum(dots * weight_ref[slot, :].astype(jnp.float32), axis=1) * (scale * LEVEL)
        return jnp.where(live, jnp.where(total == -jnp.inf, LOWEST, order_key(total)), NEVER)

    if config.parts == 1:
        key = keys(0)
    else:
        row = jnp.arange(config.parts, dtype=jnp.int32)[:, None]
        live = jnp.clip(pl.cdiv(count - program * size, config.part), 0, config.parts)
        table = lax.fori_loop(
            0,
            live,
            lambda step, table: jnp.where(row == step, keys(step)[None, :], table),
            jnp.full((config.parts, config.part), NEVER, jnp.int32),
        )
        key = table.reshape(size)
    if len(out) == 1:
        out[0][...] = key
        return
    keep, place, chosen = _best(key, limits_ref[0])
    passed = jnp.arange(out[0].shape[0], dtype=jnp.int32)
    plt.store(out[0].at[passed], jnp.full(passed.shape, NEVER, jnp.int32), mask=passed >= chosen)
    plt.store(out[0].at[place], key, mask=keep)
    plt.store(out[1].at[place], entries(program * size, size)[1], mask=keep)


def _list_kernel(
    key_ref, slot_ref, position_ref, cursor_ref, stop_ref, limits_ref, list_ref, mask_ref, *, regions, tile
):
    """Of one list: keys [E], slots [E] or the candidates' [C], position [S]; list and mask [K]."""
    b = pl.program_id(0)
    stored, cursor, stop = position_ref.shape[0], cursor_ref[b], stop_ref[b]
    dense = (cursor < limits_ref[1]) | (stop <= regions.sinks)
    entry = jnp.arange(tile, dtype=jnp.int32)
    safe = jnp.minimum(entry, key_ref.shape[0] - 1)
    key = jnp.where((entry < key_ref.shape[0]) & ~dense, key_ref[safe], NEVER)
    keep, place, chosen = _best(key, jnp.minimum(limits_ref[0], regions.best))
    place = regions.sinks + place
    slot = plt.load(slot_ref.at[jnp.minimum(entry, slot_ref.shape[0] - 1)], mask=keep, other=0)
    plt.store(list_ref.at[place], slot, mask=keep)
    plt.store(mask_ref.at[place], keep, mask=keep)

    at = jnp.arange(pl.next_power_of_2(regions.size), dtype=jnp.int32)
    behind = at - (regions.sinks + regions.best)
    near = (behind >= 0) & (behind < regions.tail)
    slot = jnp.where(dense, at, jnp.where(near, stop + behind, jnp.minimum(at, regions.sinks)))
    listed = (dense | (at < regions.sinks) | near) & (slot < jnp.minimum(cursor, stored))
    held = plt.load(position_ref.at[jnp.minimum(slot, stored - 1)], mask=listed, other=-1)
    rest = (at < regions.size) & ((at < regions.sinks) | (at >= regions.sinks + chosen))
    plt.store(list_ref.at[at], jnp.minimum(slot, stored - 1), mask=rest)
    plt.store(mask_ref.at[at], listed & (held >= 0), mask=rest)


def rerank(
    query,
    slots,
    count,
    magnitudes,
    weight,
    position,
    cursor,
    stop,
    budget,
    enough,
    *,
    regions,
    scale,
    config: Config | None = None,
    interpret=False,
):
    """See ``pallas_kernels.rerank.rerank``; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, candidates = slots.shape
    config = default_config(candidates, regions.best) if config is None else config
    limits = jnp.stack([jnp.asarray(budget, jnp.int32), jnp.asarray(enough, jnp.int32)])
    levels = jnp.asarray(np.array(SIGNED_LEVELS, np.float32))
    programs, passed = _programs(config, candidates), _passed(config, regions.best)
    entries = programs * passed
    outs = 1 if passed == config.part * config.parts else 2
    out_shape = [jax.ShapeDtypeStruct((batch, heads, entries), jnp.int32)] * outs
    keys, *passed_on = triton_call(
        functools.partial(_estimate_kernel, config=config, scale=scale),
        grid=(batch, heads, programs),
        in_specs=[
            _of_list(query),
            _whole(levels),
            _of_list(slots),
            _whole(count),
            _whole(limits),
            _of_list(magnitudes),
            _of_list(weight),
        ],
        out_specs=[pl.BlockSpec((None, None, passed), lambda b, h, i: (b, h, i))] * outs,
        out_shape=out_shape,
        name="rerank_estimates",
        num_warps=config.num_warps,
        interpret=interpret,
    )(query, levels, slots, count, limits, magnitudes, weight)
    listed = passed_on[0] if passed_on else slots
    tile = max(pl.next_power_of_2(entries), 16)
    shape = (batch, heads, regions.size)
    return triton_call(
        functools.partial(_list_kernel, regions=regions, tile=tile),
        grid=(batch, heads),
        in_specs=[_of_list(keys), _of_list(listed), _of_list(position), _whole(cursor), _whole(stop), _whole(limits)],
        out_specs=[pl.BlockSpec((None, None, regions.size), lambda b, h: (b, h, 0))] * 2,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.bool_)],
        name="rerank_list",
        num_warps=min(max(tile // 512, 4), 16),
        interpret=interpret,
    )(keys, listed, position, cursor, stop, limits)


def _whole(x):
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)


def _of_list(x):
    return pl.BlockSpec((None, None, *x.shape[2:]), lambda b, h, *_: (b, h) + (0,) * (x.ndim - 2))


def check(query, slots, count, magnitudes, weight, position, cursor, stop, budget, enough, *, regions, scale):
    """Raise ``NotImplementedError`` for what the kernels do not take."""
    dim, stored = query.shape[-1], position.shape[2]
    if dim < 16 or dim > 256 or dim & (dim - 1):
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from 16 to 256")
    if 1 << 31 <= magnitudes.size < 1 << 32:
        raise NotImplementedError(f"got {magnitudes.size} bytes of magnitudes, expected below 2 GiB or at least 4 GiB")
    if regions.size > stored:
        raise NotImplementedError(f"got a list of {regions.size} for {stored} slots, expected at most as many")
    if regions.size > MOST_ENTRIES or not slots.shape[2] or default_config(slots.shape[2], regions.best) is None:
        raise NotImplementedError(
            f"got the best {regions.best} of {slots.shape[2]} candidates in a list of {regions.size}, expected few enough "
            f"to leave {MOST_ENTRIES} for one program"
        )
