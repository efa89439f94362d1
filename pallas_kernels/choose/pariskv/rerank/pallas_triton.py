"""Estimates of the candidates and the list of a decode step, as two Pallas Triton kernels.

1. Estimates, programs over candidates. The codes of a candidate are gathered as one row, and a thread reduces its part of the
   row in its registers (`products`). The kernel writes all estimates, and the best estimate of every chunk.
2. The list, one program per list, by two searches (`pallas_kernels._triton.kth_best`) over thresholds in registers. Only the
   first step of a search counts keys in bins of shared memory.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.block_specs import of_head, whole
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_bytes, check_head_dim
from pallas_kernels._triton.kth_best import best_of, chunk_for, contenders, held
from pallas_kernels._triton.kth_search import LOWEST, NEVER, order_key
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.choose.pariskv.rerank.products import PACK, products
from pallas_kernels.formats.key_codes import LEVEL

MOST_ENTRIES = 1 << 13  # entries that one program can hold in registers


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided; sizes are powers of two.

    Attributes:
        part: candidates estimated at once, at least 16.
        parts: parts per program, one after the other.
        num_warps: warps per program of the estimates.
        chunk: candidates per chunk, at most ``part``; the first search sees only the best estimate of each chunk.
        list_warps: warps of the list's program; None decides by the number of entries that it holds.
    """

    part: int = 64
    parts: int = 1
    num_warps: int = 4
    chunk: int = 4
    list_warps: int | None = None

    def __post_init__(self):
        sizes = (self.part, self.parts, self.chunk)
        if any(size < 1 or size & (size - 1) for size in sizes) or self.part < max(16, self.chunk):
            raise ValueError(f"rerank: got {self}, expected powers of two, part at least 16 and at least chunk")


def default_config(candidates: int, best: int, lists: int = 1) -> Config | None:
    """Choose the config whose chunks leave the fewest entries for the list's program; None if every chunk leaves too many.

    Args:
        candidates: candidates of a list.
        best: how many candidates are chosen.
        lists: B*H.
    """
    if (chunk := chunk_for(candidates, best, MOST_ENTRIES)) is None:
        return None
    # A program reads the query once for all its parts. Several parts pay where there are enough programs anyway.
    part = max(16, chunk)  # 16 candidates per warp: more were slower, and so were fewer
    return Config(part=part, parts=1 if lists * candidates <= 1 << 17 else 4, num_warps=part // 16, chunk=chunk)


def _estimate_kernel(query_ref, slots_ref, count_ref, rows_ref, key_ref, *most_ref, config, scale, interpret):
    # Of one list: query [D], slots [C], rows [S, D]. Of all lists: count [B, H]. Results of this program: keys of its
    # candidates, and the greatest key of each chunk if there are two searches.
    b, h, program = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    stored, count = rows_ref.shape[0], count_ref[b, h]
    part, chunks, begin = config.part, config.part // config.chunk, program * config.part * config.parts
    query = query_ref[...]

    def listed(step):
        entry = begin + step * part + jnp.arange(part, dtype=jnp.int32)
        return slots_ref[jnp.minimum(entry, slots_ref.shape[0] - 1)]

    def estimate(step, slot):
        live = begin + step * part + jnp.arange(part, dtype=jnp.int32) < count
        slot = jnp.where(live, jnp.clip(slot, 0, stored - 1), 0)
        ahead = listed(step + 1)  # loaded while this part is worked on
        total = products(rows_ref[slot, :], query, interpret) * (scale * LEVEL)
        # An estimate of -inf is an estimate: it gets the lowest key. NaN is never chosen.
        key = jnp.where(live, jnp.where(total == -jnp.inf, LOWEST, order_key(total)), NEVER)
        key_ref[pl.ds(step * part, part)] = key
        if most_ref:
            most_ref[0][pl.ds(step * chunks, chunks)] = jnp.max(key.reshape(chunks, config.chunk), axis=1)
        return ahead

    def nothing(step, carry):  # a part behind the last candidate
        key_ref[pl.ds(step * part, part)] = jnp.full((part,), NEVER, jnp.int32)
        if most_ref:
            most_ref[0][pl.ds(step * chunks, chunks)] = jnp.full((chunks,), NEVER, jnp.int32)
        return carry

    first = listed(0)  # loaded before the count is known
    live = jnp.clip(pl.cdiv(count - begin, part), 0, config.parts)
    lax.fori_loop(0, live, estimate, first)
    lax.fori_loop(live, config.parts, nothing, 0)


def _list_kernel(*refs, regions, chunk, entries, threads, interpret):
    # Of one list: the greatest key of each chunk, if there are two searches; keys [E], slots [C], position [S]. Of all rows:
    # cursor, stop [B]; limits [2] (budget and enough). Results: list and mask [K], and the chosen chunks if there are any.
    two = entries[0] > 0
    most_ref, found_ref = (refs[0], refs[-1]) if two else (None, None)
    key_ref, slot_ref, position_ref, cursor_ref, stop_ref, limits_ref, list_ref, mask_ref = refs[two : two + 8]
    b = pl.program_id(0)
    stored, cursor, stop = position_ref.shape[0], cursor_ref[b], stop_ref[b]
    dense = (cursor < limits_ref[1]) | (stop <= regions.sinks)
    wanted = jnp.where(dense, 0, jnp.minimum(limits_ref[0], regions.best))

    # Everything that does not depend on a search is computed and loaded before it: entries of sinks, of the tail, and of rows
    # that attend to everything.
    at = jnp.arange(pl.next_power_of_2(regions.size), dtype=jnp.int32)
    behind = at - (regions.sinks + regions.best)
    near = (behind >= 0) & (behind < regions.tail)
    slot = jnp.where(dense, at, jnp.where(near, stop + behind, jnp.minimum(at, regions.sinks)))
    listed = (dense | (at < regions.sinks) | near) & (slot < jnp.minimum(cursor, stored))
    slot = jnp.minimum(slot, stored - 1)
    listed = listed & (plt.load(position_ref.at[slot], mask=listed, other=-1) >= 0)

    entry, key = contenders(key_ref, most_ref, found_ref, wanted, chunk, entries, threads, interpret)
    keep, place, chosen, _ = best_of(key, wanted, 0, threads, interpret)
    place = regions.sinks + place
    best = plt.load(slot_ref.at[entry], mask=keep, other=0)
    plt.store(list_ref.at[place], best, mask=keep)
    plt.store(mask_ref.at[place], keep, mask=keep)
    # The chosen candidates stand behind the sinks. Entries that no candidate fills are written here, masked.
    rest = (at < regions.size) & ((at < regions.sinks) | (at >= regions.sinks + chosen))
    plt.store(list_ref.at[at], slot, mask=rest)
    plt.store(mask_ref.at[at], listed, mask=rest)


def rerank(
    query, slots, count, rows, position, cursor, stop, budget, enough, *, regions, scale, config: Config | None = None,
    interpret=False,
):  # fmt: skip
    """List the best candidates by estimate between the first and the last slots; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, candidates = slots.shape
    config = default_config(candidates, regions.best, batch * heads) if config is None else config
    least = PACK * 32 * config.num_warps // query.shape[-1]
    if config.part < least and not interpret:  # a thread would have fewer bytes than the assembly takes
        raise ValueError(f"rerank: got {config}, expected a part of at least {least} at head_dim {query.shape[-1]}")
    limits = jnp.stack([jnp.asarray(budget, jnp.int32), jnp.asarray(enough, jnp.int32)])
    entries = held(candidates, regions.best, config.chunk)
    keys, *most = _keys(query, slots, count, rows, config, entries[0] > 0, scale, interpret)
    outs = [(regions.size, jnp.int32), (regions.size, jnp.bool_)]
    if most:
        outs.append((entries[1] // config.chunk, jnp.int32))
    warps = min(max(max(entries) // 256, 4), 16) if config.list_warps is None else config.list_warps
    listed, mask, *_ = triton_call(
        functools.partial(
            _list_kernel, regions=regions, chunk=config.chunk, entries=entries, threads=32 * warps, interpret=interpret
        ),
        grid=(batch, heads),
        in_specs=[
            *map(of_head, most),
            of_head(keys),
            of_head(slots),
            of_head(position),
            whole(cursor),
            whole(stop),
            whole(limits),
        ],
        out_specs=[pl.BlockSpec((None, None, size), lambda b, h: (b, h, 0)) for size, _ in outs],
        out_shape=[jax.ShapeDtypeStruct((batch, heads, size), dtype) for size, dtype in outs],
        name="rerank_list",
        num_warps=warps,
        interpret=interpret,
    )(*most, keys, slots, position, cursor, stop, limits)
    return listed, mask


def _keys(query, slots, count, rows, config, two, scale, interpret):
    """Compute keys of the candidates int32 [B, H, C or more]; for two searches also the greatest key of each chunk."""
    batch, heads, candidates = slots.shape
    size = config.part * config.parts
    programs, sizes = pl.cdiv(candidates, size), [size, size // config.chunk] if two else [size]
    return triton_call(
        functools.partial(_estimate_kernel, config=config, scale=scale, interpret=interpret),
        grid=(batch, heads, programs),
        in_specs=[of_head(query), of_head(slots), whole(count), of_head(rows)],
        out_specs=[pl.BlockSpec((None, None, size), lambda b, h, i: (b, h, i)) for size in sizes],
        out_shape=[jax.ShapeDtypeStruct((batch, heads, programs * size), jnp.int32) for size in sizes],
        name="rerank_estimates",
        num_warps=config.num_warps,
        interpret=interpret,
    )(query, slots, count, rows)


def estimates(query, slots, count, rows, *, scale, interpret=False):
    """Estimate the product of the query with each candidate; ``interpret=True`` runs anywhere, slowly."""
    candidates = slots.shape[2]
    many = slots.shape[0] * slots.shape[1] * candidates > 1 << 17
    (keys,) = _keys(query, slots, count, rows, Config(parts=4 if many else 1), False, scale, interpret)
    keys = keys[..., :candidates]
    number = lax.bitcast_convert_type(keys ^ ((keys >> 31) & 0x7FFFFFFF), jnp.float32)  # as `order_key` made the keys
    return jnp.where(keys > NEVER, jnp.maximum(number, jnp.finfo(jnp.float32).min), -jnp.inf)


def check_estimates(query, slots, count, rows, *, scale):
    """Raise ``NotImplementedError`` for sizes that the kernel does not take."""
    dim = query.shape[-1]
    check_head_dim(dim, 32)
    check_bytes(rows)
    if not slots.shape[2]:
        raise NotImplementedError("got no candidates")


def check(query, slots, count, rows, position, cursor, stop, budget, enough, *, regions, scale):
    """Raise ``NotImplementedError`` for sizes that the kernels do not take."""
    dim, stored = query.shape[-1], position.shape[2]
    check_head_dim(dim, 32)
    check_bytes(rows)
    if regions.size > stored:
        raise NotImplementedError(f"got a list of {regions.size} for {stored} slots, expected at most as many")
    if regions.size > MOST_ENTRIES or not slots.shape[2] or default_config(slots.shape[2], regions.best) is None:
        raise NotImplementedError(
            f"got the best {regions.best} of {slots.shape[2]} candidates in a list of {regions.size}, expected few enough "
            f"to leave {MOST_ENTRIES} for one program"
        )
