"""True entries of mask rows as lists: one Pallas Triton kernel, or two where rows are long.

Each program lists one stretch of a row. It must know how many true entries stand before its stretch. In a short row every
program counts the whole row; in a long row, which is too much to read again, a first kernel counts every stretch.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        tile: entries per step, a power of two.
        alone: longest row that every program counts for itself.
        programs: programs over all rows, approximately.
        num_warps: warps per program.
    """

    tile: int = 2048
    alone: int = 2**15
    programs: int = 256
    num_warps: int = 8

    def __post_init__(self):
        if self.tile < 16 or self.tile & (self.tile - 1):
            raise ValueError(f"compact: got tile={self.tile}, expected a power of two of at least 16")


def _load(mask_ref, begin, end, tile):
    """Load a tile of the mask from ``begin`` on: slots int32 [tile], and int32 [tile], 1 for true entries before ``end``."""
    slot = begin + jnp.arange(tile, dtype=jnp.int32)
    return slot, plt.load(mask_ref.at[slot], mask=slot < end, other=False).astype(jnp.int32)


def _count(mask_ref, count_ref, *, slots, tile, steps):
    # Of one row: mask [S]; count [segments]. A program counts one segment.
    segment = pl.program_id(1)
    begin = segment * (steps * tile)

    def add_tile(step, hits):
        return hits + _load(mask_ref, begin + step * tile, slots, tile)[1]

    steps = jnp.minimum(steps, pl.cdiv(slots - begin, tile))
    count_ref[segment] = jnp.sum(lax.fori_loop(0, steps, add_tile, jnp.zeros((tile,), jnp.int32)))


def _place(mask_ref, *refs, slots, tile, steps, segments):
    # Of one row: mask [S]; count [segments] if the kernel before made it; list and keep [K].
    *found_ref, list_ref, keep_ref = refs
    segment, capacity = pl.program_id(1), list_ref.shape[0]
    begin = segment * (steps * tile)
    if found_ref:
        index = jnp.arange(pl.next_power_of_2(segments), dtype=jnp.int32)
        found = plt.load(found_ref[0].at[index], mask=index < segments, other=0)
        before, total = jnp.sum(jnp.where(index < segment, found, 0)), jnp.sum(found)
    else:

        def add_tile(step, carry):
            _, hit = _load(mask_ref, step * tile, slots, tile)
            # A stretch consists of whole tiles, so each tile lies before this stretch as a whole or not at all.
            return carry[0] + jnp.where(step < segment * steps, hit, 0), carry[1] + hit

        none = jnp.zeros((tile,), jnp.int32)
        before, total = (jnp.sum(x) for x in lax.fori_loop(0, pl.cdiv(slots, tile), add_tile, (none, none)))

    def list_tile(step, before):
        slot, hit = _load(mask_ref, begin + step * tile, slots, tile)
        # A true entry goes behind all true entries of lower slots.
        place = before + lax.cumsum(hit, axis=0) - hit
        plt.store(list_ref.at[place], slot, mask=(hit > 0) & (place < capacity))
        return before + jnp.sum(hit)

    own = jnp.minimum(steps, pl.cdiv(slots - begin, tile))
    lax.fori_loop(0, own, list_tile, before)

    # The programs of a row share out the entries behind the list, and the mask.
    def fill(step, _):
        at = (step * segments + segment) * tile + jnp.arange(tile, dtype=jnp.int32)
        plt.store(list_ref.at[at], jnp.zeros((tile,), jnp.int32), mask=(at >= total) & (at < capacity))
        plt.store(keep_ref.at[at], at < total, mask=at < capacity)
        return _

    lax.fori_loop(0, pl.cdiv(capacity, tile * segments), fill, jnp.int32(0))


def _row(size):
    return pl.BlockSpec((None, size), lambda i, j: (i, 0))


def compact(mask, capacity, *, config: Config | None = None, interpret=False):
    """List the first true entries of each row of a mask; ``interpret=True`` runs anywhere, slowly."""
    config = Config() if config is None else config
    slots, lists = mask.shape[-1], math.prod(mask.shape[:-1])
    flat = mask.reshape(lists, slots)
    tiles = pl.cdiv(slots, config.tile)
    steps = pl.cdiv(tiles, max(1, min(tiles, config.programs // lists)))
    segments = pl.cdiv(tiles, steps)
    cut = {"slots": slots, "tile": config.tile, "steps": steps}
    call = functools.partial(triton_call, grid=(lists, segments), num_warps=config.num_warps, interpret=interpret)
    operands, in_specs = [flat], [_row(slots)]
    if slots > config.alone and segments > 1:
        found = call(
            functools.partial(_count, **cut),
            in_specs=in_specs,
            out_specs=_row(segments),
            out_shape=jax.ShapeDtypeStruct((lists, segments), jnp.int32),
            name="compact_count",
        )(flat)
        operands, in_specs = [flat, found], [*in_specs, _row(segments)]
    listed, keep = call(
        functools.partial(_place, **cut, segments=segments),
        in_specs=in_specs,
        out_specs=[_row(capacity), _row(capacity)],
        out_shape=[jax.ShapeDtypeStruct((lists, capacity), jnp.int32), jax.ShapeDtypeStruct((lists, capacity), jnp.bool_)],
        name="compact",
    )(*operands)
    return listed.reshape(*mask.shape[:-1], capacity), keep.reshape(*mask.shape[:-1], capacity)


def check(mask, capacity):
    """Raise ``NotImplementedError`` for empty masks and for masks whose offsets do not fit in 32 bits."""
    if mask.size > 2**31 - 1 or mask.size * capacity == 0:
        raise NotImplementedError(f"got mask {mask.shape}, {capacity=}, expected 1 to 2**31 - 1 entries and a capacity")
