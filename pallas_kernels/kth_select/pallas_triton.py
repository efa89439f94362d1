"""The best entries of score rows by threshold search, in one Pallas Triton kernel or, for long rows, three.

A row of up to ``direct`` entries, or one of which much is wanted, is one program's: it holds the keys in registers, searches
the threshold, writes the list. A longer row goes through

1. ``maxima``: entries are dealt to N nodes in turn (entry i to node i mod N, so that neighbours, which attention likes
   together, fall apart); each node keeps its maximum. At least k entries reach the k-th best maximum.
2. ``filter``: every program finds a number that k to 9/8 k maxima reach, and lists the entries of its own stretch of the
   row that reach it. For independent scores some 1.4 k entries of the whole row do, for any others still less than all.
3. ``choose``: one program packs these lists and treats them as a short row.

Nothing is approximate, nothing depends on the order of programs, no atomics.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.kth_select.search import ALL, INFINITE, LOWEST, NEVER, bounds_of, find, order_key, rank
from pallas_kernels.triton_call import triton_call

MOST_WANTED = 8192  # of a long row: twice as many nodes, whose keys one program holds in registers
MOST_TILE = 2**14  # `rank` counts in halves of a word


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut; sizes are powers of two.

    Attributes:
        direct: longest row that one program reads whole, at most 2**14; where at least a quarter is wanted it is 2**14.
        nodes: maxima per row; None takes twice the capacity, from 512 up.
        width: nodes per program of ``maxima``.
        depth: entries per node that it loads at once.
        tile: entries per step of ``filter`` and ``choose``; None takes twice the capacity, within 512 and 4096.
        programs: of ``filter``, over all rows, about.
        pack: entries per step of packing; None takes two tiles.
        warps: per program of ``maxima``, ``filter``, ``choose``; None goes by the tile.
        direct_warps: per program on a short row; None goes by its length.
    """

    direct: int = 4096
    nodes: int | None = None
    width: int = 64
    depth: int = 32
    tile: int | None = None
    programs: int = 256
    pack: int | None = None
    warps: tuple[int, int, int] | None = None
    direct_warps: int | None = None

    def __post_init__(self):
        sizes = (self.direct, self.nodes or 1, self.width, self.depth, self.tile or 1, self.pack or 1)
        if any(x < 1 or x & (x - 1) for x in sizes) or max(self.direct, self.tile or 1) > MOST_TILE:
            raise ValueError(f"kth_select: got {self}, expected powers of two, direct and tile up to {MOST_TILE}")

    def filled(self, capacity: int) -> Config:
        """With what is None decided for lists of ``capacity``."""
        twice = pl.next_power_of_2(2 * capacity)  # the last program chooses among some 1.4 times as many
        tile = self.tile or min(max(twice, 512), 4096)
        return dataclasses.replace(
            self,
            nodes=self.nodes or max(twice, 512),
            tile=tile,
            pack=self.pack or 2 * tile,
            warps=self.warps or ((4, 4, 4) if tile <= 1024 else (4, 8, 8)),
        )


def _maxima(score_ref, node_ref, *, slots, nodes, width, depth):
    # score [S]; node [nodes] int32 keys
    node = pl.program_id(1) * width + jnp.arange(width, dtype=jnp.int32)
    row = jnp.arange(depth, dtype=jnp.int32) * nodes

    def add_rows(step, best):
        at = (step * depth * nodes + row)[:, None] + node[None, :]
        score = plt.load(score_ref.at[at], mask=at < slots, other=-jnp.inf)
        return jnp.maximum(best, jnp.max(jnp.where(score > -jnp.inf, score, -jnp.inf), axis=0))

    best = jnp.full((width,), -jnp.inf, jnp.float32)
    best = lax.fori_loop(0, pl.cdiv(slots, nodes * depth), add_rows, best)
    plt.store(node_ref.at[node], order_key(best))


def _wanted(budget_ref, budget, most):
    asked = budget_ref[0][0] if budget_ref else jnp.int32(budget)
    return jnp.minimum(jnp.maximum(asked, 0), most)


def _filter(score_ref, node_ref, *refs, budget, most, slots, tile, steps):
    # score [S]; node [nodes]; budget [1] if traced; count [segments]; keys and slots [segments * steps * tile]
    *budget_ref, count_ref, key_ref, slot_ref = refs
    wanted = jnp.maximum(_wanted(budget_ref, budget, most), 1)
    node = node_ref[...]
    low, high, held, infinite = bounds_of(node)

    def count(pivot):
        return jnp.sum((node >= pivot).astype(jnp.int32))

    def below(pivot):
        return jnp.max(jnp.where(node < pivot, node, NEVER))

    threshold, _, _ = find(count, below, low, high, held, wanted, wanted >> 3, infinite)
    # Fewer nodes than wanted hold anything: then every entry counts, not only those above some maximum.
    threshold = jnp.where(held < wanted, LOWEST, threshold)
    segment = pl.program_id(1)
    begin = segment * (steps * tile)

    def add_tile(step, carry):
        slot = begin + step * tile + jnp.arange(tile, dtype=jnp.int32)
        key = order_key(plt.load(score_ref.at[slot], mask=slot < slots, other=-jnp.inf))
        # Of entries equal to the threshold no more than `wanted` can be chosen.
        keep, place, over, equal = rank(key, threshold, wanted, *carry)
        plt.store(key_ref.at[begin + place], key, mask=keep)
        plt.store(slot_ref.at[begin + place], slot, mask=keep)
        return over, equal

    over, equal = add_tile(0, (jnp.int32(0), jnp.int32(0)))
    if steps > 1:
        steps = jnp.minimum(steps, pl.cdiv(slots - begin, tile))
        over, equal = lax.fori_loop(1, steps, add_tile, (over, equal))
    count_ref[segment] = over + jnp.minimum(equal, wanted)


def _emit(load, tiles, tile, wanted, list_ref, keep_ref, count_ref):
    """Search the threshold of the best ``wanted`` entries and write the list.

    ``load(i)`` gives keys [tile] of tile i, ``NEVER`` beyond the end, and a function that gives its slots. The first tile
    stays in registers, the others are read again by each count.
    """
    first, first_slots = load(0)
    alone = isinstance(tiles, int) and tiles == 1  # then it needs no loop

    def over_tiles(fold, start):
        carry = fold(first, start)
        return carry if alone else lax.fori_loop(1, tiles, lambda i, carry: fold(load(i)[0], carry), carry)

    def widen(key, carry):
        low, high, number, infinite = bounds_of(key)
        return (
            jnp.minimum(carry[0], low),
            jnp.maximum(carry[1], high),
            carry[2] + number,
            carry[3] + infinite,
        )

    low, high, held, infinite = bounds_of(first) if alone else over_tiles(widen, (INFINITE, NEVER, 0, 0))

    def count(pivot):
        hits = over_tiles(lambda key, hits: hits + (key >= pivot).astype(jnp.int32), jnp.zeros((tile,), jnp.int32))
        return jnp.sum(hits)

    def below(pivot):
        best = jnp.full((tile,), NEVER, jnp.int32)
        return jnp.max(over_tiles(lambda key, best: jnp.maximum(best, jnp.where(key < pivot, key, NEVER)), best))

    threshold, reach, over = find(count, below, low, high, held, wanted, 0, infinite)
    ties = jnp.where(reach > wanted, wanted - over, ALL)
    chosen = jnp.minimum(held, wanted)

    def write(key, slot, over, equal):
        keep, place, over, equal = rank(key, threshold, ties, over, equal)
        plt.store(list_ref.at[place], slot, mask=keep & (place < chosen))
        return over, equal

    begun = write(first, first_slots(), jnp.int32(0), jnp.int32(0))
    if not alone:

        def unwritten(carry):
            step, over, equal = carry
            return (step < tiles) & (over + jnp.minimum(equal, ties) < chosen)

        def write_tile(carry):
            key, slots = load(carry[0])
            return carry[0] + 1, *write(key, slots(), *carry[1:])

        lax.while_loop(unwritten, write_tile, (jnp.int32(1), *begun))

    capacity, block = list_ref.shape[0], min(tile, pl.next_power_of_2(list_ref.shape[0]))

    def fill(step, _):
        at = step * block + jnp.arange(block, dtype=jnp.int32)
        plt.store(list_ref.at[at], jnp.zeros((block,), jnp.int32), mask=(at >= chosen) & (at < capacity))
        plt.store(keep_ref.at[at], at < chosen, mask=at < capacity)
        return _

    lax.fori_loop(0, pl.cdiv(capacity, block), fill, jnp.int32(0))
    count_ref[0] = chosen


def _direct(score_ref, *refs, budget, most, slots, tile):
    # score [S]; budget [1] if traced; list and keep [K]; count [1]
    *budget_ref, list_ref, keep_ref, count_ref = refs

    def load(_):
        slot = jnp.arange(tile, dtype=jnp.int32)
        return order_key(plt.load(score_ref.at[slot], mask=slot < slots, other=-jnp.inf)), lambda: slot

    wanted = _wanted(budget_ref, budget, most)
    _emit(load, 1, tile, wanted, list_ref, keep_ref, count_ref)


def _choose(found_ref, key_ref, slot_ref, *refs, budget, most, tile, segments, pack, stretch, interpret):
    # found [segments]; keys and slots [segments * stretch]; budget [1] if traced; list, keep [K]; count [1];
    # packed keys and packed slots, as long as keys and slots
    *budget_ref, list_ref, keep_ref, count_ref, packed_key_ref, packed_slot_ref = refs
    padded = pl.next_power_of_2(segments)
    segment = jnp.arange(padded, dtype=jnp.int32)
    found = plt.load(found_ref.at[segment], mask=segment < segments, other=0)
    before = lax.cumsum(found, axis=0) - found
    held = jnp.sum(found)
    wide = max(pack // padded, 1)

    def pack_block(step, _):
        entry = step * wide + jnp.arange(wide, dtype=jnp.int32)
        live = entry[None, :] < found[:, None]
        source, target = (segment * stretch)[:, None] + entry[None, :], before[:, None] + entry[None, :]
        for here, there, none in ((key_ref, packed_key_ref, NEVER), (slot_ref, packed_slot_ref, 0)):
            plt.store(there.at[target], plt.load(here.at[source], mask=live, other=none), mask=live)
        return _

    lax.fori_loop(0, pl.cdiv(jnp.max(found), wide), pack_block, jnp.int32(0))
    if not interpret:
        plt.debug_barrier()  # what follows reads what other threads of this program wrote

    def load(step):
        at = step * tile + jnp.arange(tile, dtype=jnp.int32)
        live = at < held
        key = plt.load(packed_key_ref.at[at], mask=live, other=NEVER)
        return key, lambda: plt.load(packed_slot_ref.at[at], mask=live, other=0)

    wanted = _wanted(budget_ref, budget, most)
    _emit(load, pl.cdiv(held, tile), tile, wanted, list_ref, keep_ref, count_ref)


def _budget_operand(budget, heads):
    """Operands and specs for a budget: none for a number, else int32 [n] read where list i of [B, H] finds its own."""
    if not isinstance(budget, jax.Array):
        return int(budget), [], []
    rows, columns = (1,) * (2 - budget.ndim) + budget.shape

    def own(i, *_):
        return ((i // heads if rows > 1 else 0) * columns + (i % heads if columns > 1 else 0),)

    return None, [budget.reshape(rows * columns)], [pl.BlockSpec((1,), own)]


def _row(size):
    return pl.BlockSpec((None, size), lambda i, *_: (i, 0))


def kth_select(score, budget, capacity, *, config: Config | None = None, interpret=False):
    """Slots, keep and count: see ``pallas_kernels.kth_select.kth_select``; ``interpret=True`` runs anywhere, slowly."""
    config = Config() if config is None else config
    rows, heads, slots = score.shape
    lists, flat = rows * heads, score.reshape(rows * heads, slots)
    number, budgets, budget_specs = _budget_operand(budget, heads)
    common = {"budget": number, "most": min(capacity, slots)}
    out_specs = [_row(capacity), _row(capacity), _row(1)]
    out_shape = [
        jax.ShapeDtypeStruct((lists, capacity), jnp.int32),
        jax.ShapeDtypeStruct((lists, capacity), jnp.bool_),
        jax.ShapeDtypeStruct((lists, 1), jnp.int32),
    ]
    # Where a quarter of a row is wanted, the maxima would leave most of it.
    if slots <= config.direct or slots <= min(MOST_TILE, 4 * capacity):
        tile = max(pl.next_power_of_2(slots), 16)
        outs = triton_call(
            functools.partial(_direct, **common, slots=slots, tile=tile),
            grid=(lists,),
            in_specs=[_row(slots), *budget_specs],
            out_specs=out_specs,
            out_shape=out_shape,
            num_warps=min(max(tile // 512, 1), 16) if config.direct_warps is None else config.direct_warps,
            interpret=interpret,
            name="kth_select",
        )(flat, *budgets)
    else:
        config = config.filled(capacity)
        found, key, slot, segments = _candidates(flat, budgets, budget_specs, common, config, interpret)
        size, tile = key.shape[1], config.tile
        packed = jax.ShapeDtypeStruct((lists, size), jnp.int32)
        outs = triton_call(
            functools.partial(
                _choose, **common, tile=tile, segments=segments, pack=config.pack, stretch=size // segments,
                interpret=interpret,
            ),
            grid=(lists,),
            in_specs=[_row(segments), _row(size), _row(size), *budget_specs],
            out_specs=[*out_specs, _row(size), _row(size)],
            out_shape=[*out_shape, packed, packed],
            num_warps=config.warps[2],
            interpret=interpret,
            name="kth_choose",
        )(found, key, slot, *budgets)  # fmt: skip
    listed, keep, count = outs[:3]
    return listed.reshape(rows, heads, -1), keep.reshape(rows, heads, -1), count.reshape(rows, heads)


def _candidates(flat, budgets, budget_specs, common, config, interpret):
    """Entries that may be among the best, per segment of each row: how many, keys, slots; and how many segments."""
    lists, slots = flat.shape
    nodes, width = config.nodes, min(config.width, config.nodes)
    depth = min(config.depth, pl.next_power_of_2(pl.cdiv(slots, nodes)))
    maxima = triton_call(
        functools.partial(_maxima, slots=slots, nodes=nodes, width=width, depth=depth),
        grid=(lists, nodes // width),
        in_specs=[_row(slots)],
        out_specs=_row(nodes),
        out_shape=jax.ShapeDtypeStruct((lists, nodes), jnp.int32),
        num_warps=config.warps[0],
        interpret=interpret,
        name="kth_maxima",
    )(flat)
    tiles = pl.cdiv(slots, config.tile)
    steps = pl.cdiv(tiles, max(1, min(tiles, config.programs // lists, config.pack)))
    segments = pl.cdiv(tiles, steps)
    listed = jax.ShapeDtypeStruct((lists, segments * steps * config.tile), jnp.int32)
    found, key, slot = triton_call(
        functools.partial(_filter, **common, slots=slots, tile=config.tile, steps=steps),
        grid=(lists, segments),
        in_specs=[_row(slots), _row(nodes), *budget_specs],
        out_specs=[_row(segments), _row(listed.shape[1]), _row(listed.shape[1])],
        out_shape=[jax.ShapeDtypeStruct((lists, segments), jnp.int32), listed, listed],
        num_warps=config.warps[1],
        interpret=interpret,
        name="kth_filter",
    )(flat, maxima, *budgets)
    return found, key, slot, segments


def check(score, budget, capacity):
    """Raise ``NotImplementedError`` for rows and capacities the kernels do not take."""
    slots = score.shape[-1]
    if slots > MOST_TILE and capacity > MOST_WANTED:
        raise NotImplementedError(
            f"got capacity {capacity} for rows of {slots}, expected at most {MOST_WANTED} for rows of more than {MOST_TILE}"
        )
    if slots > 2**28 or score.size == 0:
        raise NotImplementedError(f"got score {score.shape}, expected rows of 1 to {2**28}")
