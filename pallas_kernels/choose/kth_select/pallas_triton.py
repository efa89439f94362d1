"""The best entries of score rows by threshold search, as one Pallas Triton kernel, or three for long rows.

One program handles a row of up to ``direct`` entries, or a row with a large part wanted: it holds the keys in
registers, searches the threshold, and writes the list. For a longer row there are three kernels:

1. ``maxima``: entry i belongs to node i mod N, and each node keeps its maximum. Neighbours, which often score high together,
   belong to different nodes. At least k entries reach the k-th best maximum.
2. ``filter``: every program finds a threshold that k to 9/8 k maxima reach. It lists the entries of its own stretch of the
   row that reach this threshold. In a row of independent scores these are some 1.4 k entries.
3. ``choose``: one program takes these lists, one behind the other, as a short row.

Of logits of several query heads, the first kernel makes the scores; ``maxima`` writes them for ``filter``.

The result is exact and does not depend on the order of programs; there are no atomics.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.block_specs import of_list
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.kth_search import LOWEST, NEVER, bounds_of, find, order_key, rank
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels.choose.kth_select.listing import finish, list_best
from pallas_kernels.numerics import finite_or_zero

MOST_WANTED = 8192  # capacity for long rows: there are twice as many nodes, whose keys one program holds in registers
FEW_SEGMENTS = 20  # up to so many, `choose` is unrolled over the segments of a row; packing is faster from some 30 on
MOST_HEADS = 16  # query heads whose logits one program reads together
MOST_TILE = 2**14  # `rank` counts in halves of a word


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided; sizes are powers of two.

    Attributes:
        direct: longest row that one program reads whole, at most 2**14. It is 2**14 where a quarter of the row is wanted.
        nodes: maxima per row; None takes twice the capacity, and at least 512.
        width: nodes per program of ``maxima``.
        depth: entries per node that ``maxima`` loads at once.
        tile: entries per step of ``filter``; None takes twice the capacity, within 512 and 4096.
        hold: entries that ``choose`` keeps in registers; None takes 1.5 times the capacity, within 256 and 8192.
        programs: programs of ``filter`` over all rows, approximately.
        warps: warps per program of ``maxima``, ``filter``, ``choose``; None decides by the tile.
        direct_warps: warps per program on a short row; None decides by its length.
    """

    direct: int = 4096
    nodes: int | None = None
    width: int = 64
    depth: int = 32
    tile: int | None = None
    hold: int | None = None
    programs: int = 256
    warps: tuple[int, int, int] | None = None
    direct_warps: int | None = None

    def __post_init__(self):
        sizes = (self.direct, self.nodes or 1, self.width, self.depth, self.tile or 1, self.hold or 1)
        if any(x < 1 or x & (x - 1) for x in sizes) or max(self.direct, self.tile or 1, self.hold or 1) > MOST_TILE:
            raise ValueError(f"kth_select: got {self}, expected powers of two, direct, tile and hold up to {MOST_TILE}")

    def filled(self, capacity: int) -> Config:
        """Fill in every None, for lists of ``capacity``."""
        twice = pl.next_power_of_2(2 * capacity)
        tile = self.tile or min(max(twice, 512), 4096)
        # The filter leaves some 1.4 times as many candidates as are wanted.
        hold = self.hold or min(max(pl.next_power_of_2(capacity + capacity // 2), 256), 8192)
        return dataclasses.replace(
            self,
            nodes=self.nodes or max(twice, 512),
            tile=tile,
            hold=hold,
            warps=self.warps or (4, 4 if tile <= 1024 else 8, 4 if hold <= 512 else 8),
        )


def _if_wanted(budget_ref, run, otherwise):
    """Call ``run``, or ``otherwise`` where a traced budget is not above 0: a row that chooses nothing costs little."""
    return lax.cond(budget_ref[0][0] > 0, run, otherwise) if budget_ref else run()


def _wanted(budget_ref, budget, most):
    asked = budget_ref[0][0] if budget_ref else jnp.int32(budget)
    return jnp.minimum(jnp.maximum(asked, 0), most)


def _loader(score_ref, lse_ref, slots):
    """Make a function from slots to their scores, -inf behind the last: of score [S], or of logits [G, S] and lse [N, G]."""

    def load(ref, at):
        return plt.load(ref, mask=at < slots, other=-jnp.inf)

    if not lse_ref:
        return lambda at: load(score_ref.at[at], at)
    parts, heads = lse_ref[0].shape
    part = jnp.arange(pl.next_power_of_2(parts), dtype=jnp.int32)

    def total(head):
        lse = jnp.where(part < parts, lse_ref[0][jnp.minimum(part, parts - 1), head], -jnp.inf)
        top = finite_or_zero(jnp.max(lse))
        return finite_or_zero(top + jnp.log(jnp.sum(jnp.exp(lse - top))))

    totals = [total(head) for head in range(heads)]
    return lambda at: functools.reduce(jnp.maximum, [load(score_ref.at[g, at], at) - totals[g] for g in range(heads)])


def _maxima(score_ref, *refs, slots, nodes, width, depth, joining):
    # Of one row: score [S]; budget [1] if traced; node [nodes] int32 keys. If joining, logits [G, S] and lse [N, G] in place
    # of the score, which is a result too. A program has `width` neighbouring nodes, so one load of `depth` entries for each
    # node reads `depth` contiguous pieces of the row.
    lse_ref, refs = refs[:joining], refs[joining:]
    *budget_ref, node_ref = refs[: len(refs) - joining]
    joined_ref = refs[len(refs) - joining :]
    node = pl.program_id(1) * width + jnp.arange(width, dtype=jnp.int32)
    row = jnp.arange(depth, dtype=jnp.int32) * nodes

    def add_rows(load, step, best):
        at = (step * depth * nodes + row)[:, None] + node[None, :]
        score = load(at)
        if joined_ref:
            plt.store(joined_ref[0].at[at], score, mask=at < slots)
        # Keys are compared, not floats: a comparison of floats may take denormal numbers for 0, and `choose` relies on the
        # exact maximum.
        return jnp.maximum(best, jnp.max(order_key(score), axis=0))

    def write():
        load, best = _loader(score_ref, lse_ref, slots), jnp.full((width,), NEVER, jnp.int32)
        best = lax.fori_loop(0, pl.cdiv(slots, nodes * depth), functools.partial(add_rows, load), best)
        plt.store(node_ref.at[node], best)

    _if_wanted(budget_ref, write, lambda: None)


def list_candidates(segment, score_ref, node_ref, *refs, budget, most, slots, tile, steps):
    """Do what the kernel ``filter`` does for one segment of a row."""
    # Of one row: score [S]; node [nodes]; budget [1] if traced. Results: count [segments], edge [2] (the least key of the
    # candidates and a number above the greatest finite key), keys and slots [segments * steps * tile].
    *budget_ref, count_ref, edge_ref, key_ref, slot_ref = refs
    begin = segment * (steps * tile)

    def load(step):
        slot = begin + step * tile + jnp.arange(tile, dtype=jnp.int32)
        return order_key(plt.load(score_ref.at[slot], mask=slot < slots, other=-jnp.inf)), slot

    def write():
        # Where registers allow it, the scores are loaded before the search, which mostly waits.
        first = load(0) if steps == 1 else None
        wanted = jnp.maximum(_wanted(budget_ref, budget, most), 1)
        # Every program of a row repeats this search over the maxima: it is cheaper than one more kernel.
        node = node_ref[...]
        low, high, held, infinite = bounds_of(node)

        def count(pivot):
            return jnp.sum((node >= pivot).astype(jnp.int32))

        def below(pivot):
            return jnp.max(jnp.where(node < pivot, node, NEVER))

        threshold, _, _ = find(count, below, low, high, held, wanted, wanted >> 3, infinite)
        # If fewer nodes than wanted hold a finite score, every entry is a candidate.
        threshold = jnp.where(held < wanted, LOWEST, threshold)
        edge_ref[0], edge_ref[1] = threshold, high  # every program of a row writes the same values

        def put(key, slot, over, equal):
            # No more than `wanted` entries that equal the threshold can be chosen.
            keep, place, over, equal = rank(key, threshold, wanted, over, equal)
            plt.store(key_ref.at[begin + place], key, mask=keep)
            plt.store(slot_ref.at[begin + place], slot, mask=keep)
            return over, equal

        over, equal = put(*(first or load(0)), jnp.int32(0), jnp.int32(0))
        if steps > 1:
            own = jnp.minimum(steps, pl.cdiv(slots - begin, tile))
            over, equal = lax.fori_loop(1, own, lambda step, carry: put(*load(step), *carry), (over, equal))
        count_ref[segment] = over + jnp.minimum(equal, wanted)

    _if_wanted(budget_ref, write, lambda: None)


def _filter(*refs, **static):
    list_candidates(pl.program_id(1), *refs, **static)


def _direct(score_ref, *refs, budget, most, slots, tile, joining):
    # Of one row: score [S], or logits [G, S] and lse [N, G] if joining; budget [1] if traced; list and keep [K]; count [1].
    # The tile holds the whole row.
    lse_ref, refs = refs[:joining], refs[joining:]
    *budget_ref, list_ref, keep_ref, count_ref = refs

    slot = jnp.arange(tile, dtype=jnp.int32)
    wanted = _wanted(budget_ref, budget, most)

    def write():
        key = order_key(_loader(score_ref, lse_ref, slots)(slot))
        return list_best(key, lambda: slot, None, 1, wanted, list_ref)

    finish(_if_wanted(budget_ref, write, lambda: wanted), list_ref, keep_ref, count_ref)


def choose(found_ref, edge_ref, key_ref, slot_ref, *refs, budget, most, tile, segments, interpret):
    """Do what the kernel ``choose`` does for one row."""
    # Of one row: found [segments], how many candidates each segment has; edge [2]; keys and slots [segments * stretch];
    # budget [1] if traced. Results: list, keep [K]; count [1]; packed keys and packed slots, as long as keys and slots, in
    # which the candidates stand without the gaps between segments.
    *budget_ref, list_ref, keep_ref, count_ref, packed_key_ref, packed_slot_ref = refs
    stretch, padded = key_ref.shape[0] // segments, pl.next_power_of_2(segments)
    few = segments <= FEW_SEGMENTS
    scalars = [found_ref[segment] for segment in range(segments)] if few else []  # loaded together with the budget
    edge, wanted = (edge_ref[0], edge_ref[1]), _wanted(budget_ref, budget, most)
    segment = jnp.arange(padded, dtype=jnp.int32)

    def pack():
        """Copy the candidates of all segments, one behind the other, and return their number."""
        found = plt.load(found_ref.at[segment], mask=segment < segments, other=0)
        before = lax.cumsum(found, axis=0) - found
        wide = max(2 * tile // padded, 1)

        def pack_block(step, _):
            entry = step * wide + jnp.arange(wide, dtype=jnp.int32)
            live = entry[None, :] < found[:, None]
            source, target = (segment * stretch)[:, None] + entry[None, :], before[:, None] + entry[None, :]
            for here, there, none in ((key_ref, packed_key_ref, NEVER), (slot_ref, packed_slot_ref, 0)):
                plt.store(there.at[target], plt.load(here.at[source], mask=live, other=none), mask=live)
            return _

        lax.fori_loop(0, pl.cdiv(jnp.max(found), wide), pack_block, jnp.int32(0))
        return jnp.sum(found)

    def gather(ends):
        """Load the first tile of candidates from where the segments hold them: the gaps between segments are skipped."""
        at = jnp.arange(tile, dtype=jnp.int32)
        gaps = (jnp.where(at >= end, stretch - found, 0) for end, found in zip(ends[:-1], scalars[:-1], strict=True))
        source, live = sum(gaps, at), at < ends[-1]
        key = plt.load(key_ref.at[source], mask=live, other=NEVER)
        slot = plt.load(slot_ref.at[source], mask=live, other=0) if tile <= 4096 else None  # now, if registers allow it
        return key, lambda: plt.load(slot_ref.at[source], mask=live, other=0) if slot is None else slot

    def write():
        ends = list(itertools.accumulate(scalars))
        # A few segments are read without packing, unless there is more than one tile of candidates.
        held = lax.cond(ends[-1] > tile, pack, lambda: ends[-1]) if few else pack()
        if not interpret:
            plt.debug_barrier()  # the search reads what other threads of this program packed

        def load(step):
            at = step * tile + jnp.arange(tile, dtype=jnp.int32)
            key = plt.load(packed_key_ref.at[at], mask=at < held, other=NEVER)
            return key, lambda: plt.load(packed_slot_ref.at[at], mask=at < held, other=0)

        key, slots_of = gather(ends) if few else load(0)
        return list_best(key, slots_of, load, pl.cdiv(held, tile), wanted, list_ref, (*edge, held))

    finish(_if_wanted(budget_ref, write, lambda: wanted), list_ref, keep_ref, count_ref)


def _budget_operand(budget, heads):
    """Return the budget as a number, its operands and their specs: a Python number has no operand.

    An array [] to [B, H] becomes int32 [n], and its spec points list i of [B, H] at its own entry.
    """
    if not isinstance(budget, jax.Array):
        return int(budget), [], []
    rows, columns = (1,) * (2 - budget.ndim) + budget.shape

    def own(i, *_):
        return ((i // heads if rows > 1 else 0) * columns + (i % heads if columns > 1 else 0),)

    return None, [budget.reshape(rows * columns)], [pl.BlockSpec((1,), own)]


def _row(size):
    return pl.BlockSpec((None, size), lambda i, *_: (i, 0))


def kth_select(score, budget, capacity, lse=None, *, config: Config | None = None, interpret=False):
    """Return slots, keep and count, as the operation does; ``interpret=True`` runs anywhere, slowly."""
    config = Config() if config is None else config
    (rows, heads), slots = score.shape[:2], score.shape[-1]
    lists = rows * heads
    # The scores, or logits and lse; a program sees only its own list.
    flat = [x.reshape(lists, *x.shape[2:]) for x in (score, lse) if x is not None]
    number, budgets, budget_specs = _budget_operand(budget, heads)
    common = {"budget": number, "most": min(capacity, slots)}
    out_specs = [_row(capacity), _row(capacity), _row(1)]
    out_shape = [
        jax.ShapeDtypeStruct((lists, capacity), jnp.int32),
        jax.ShapeDtypeStruct((lists, capacity), jnp.bool_),
        jax.ShapeDtypeStruct((lists, 1), jnp.int32),
    ]
    if is_direct(slots, capacity, config):
        tile = max(pl.next_power_of_2(slots), 16)
        outs = triton_call(
            functools.partial(_direct, **common, slots=slots, tile=tile, joining=len(flat) - 1),
            grid=(lists,),
            in_specs=[*(of_list(x, 1) for x in flat), *budget_specs],
            out_specs=out_specs,
            out_shape=out_shape,
            num_warps=min(max(tile // 512, 1), 16) if config.direct_warps is None else config.direct_warps,
            interpret=interpret,
            name="kth_select",
        )(*flat, *budgets)
    else:
        config = config.filled(capacity)
        candidates, segments = _candidates(flat, budgets, budget_specs, common, config, interpret)
        outs = triton_call(
            functools.partial(choose, **common, tile=config.hold, segments=segments, interpret=interpret),
            grid=(lists,),
            in_specs=[*(_row(x.shape[1]) for x in candidates), *budget_specs],
            out_specs=[*out_specs, *(_row(x.shape[1]) for x in candidates[2:])],
            out_shape=[*out_shape, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in candidates[2:])],
            num_warps=config.warps[2],
            interpret=interpret,
            name="kth_choose",
        )(*candidates, *budgets)
    listed, keep, count = outs[:3]
    return listed.reshape(rows, heads, -1), keep.reshape(rows, heads, -1), count.reshape(rows, heads)


def is_direct(slots: int, capacity: int, config: Config) -> bool:
    """Tell whether one program reads a whole row; where a quarter of it is wanted, the filter would keep most of it."""
    return slots <= config.direct or slots <= min(MOST_TILE, 4 * capacity)


def stretches(lists: int, slots: int, config: Config) -> tuple[int, int]:
    """Choose the tiles per program of ``filter``, and its programs per row."""
    tiles = pl.cdiv(slots, config.tile)
    steps = pl.cdiv(tiles, max(1, min(tiles, config.programs // lists)))
    return steps, pl.cdiv(tiles, steps)


def _candidates(flat, budgets, budget_specs, common, config, interpret):
    """Find the candidates of each segment of each row, and return them and the number of segments.

    Candidates are four int32 arrays: how many each segment has [L, segments]; the least key of a row's candidates and a
    number above its greatest finite key [L, 2]; keys and slots [L, segments * stretch].
    """
    lists, slots, joining = len(flat[0]), flat[0].shape[-1], len(flat) - 1
    scores = [jax.ShapeDtypeStruct((lists, slots), jnp.float32)] * joining
    nodes, width = config.nodes, min(config.width, config.nodes)
    depth = min(config.depth, pl.next_power_of_2(pl.cdiv(slots, nodes)))
    maxima, *scores = triton_call(
        functools.partial(_maxima, slots=slots, nodes=nodes, width=width, depth=depth, joining=joining),
        grid=(lists, nodes // width),
        in_specs=[*(of_list(x, 1) for x in flat), *budget_specs],
        out_specs=[_row(nodes), *(_row(slots) for _ in scores)],
        out_shape=[jax.ShapeDtypeStruct((lists, nodes), jnp.int32), *scores],
        num_warps=config.warps[0],
        interpret=interpret,
        name="kth_maxima",
    )(*flat, *budgets)
    steps, segments = stretches(lists, slots, config)
    listed = jax.ShapeDtypeStruct((lists, segments * steps * config.tile), jnp.int32)
    outs = (jax.ShapeDtypeStruct((lists, segments), jnp.int32), jax.ShapeDtypeStruct((lists, 2), jnp.int32), listed, listed)
    candidates = triton_call(
        functools.partial(_filter, **common, slots=slots, tile=config.tile, steps=steps),
        grid=(lists, segments),
        in_specs=[_row(slots), _row(nodes), *budget_specs],
        out_specs=[_row(x.shape[1]) for x in outs],
        out_shape=outs,
        num_warps=config.warps[1],
        interpret=interpret,
        name="kth_filter",
    )(*(scores or flat), maxima, *budgets)
    return candidates, segments


def check(score, budget, capacity, lse=None):
    """Raise ``NotImplementedError`` for rows and capacities that the kernels do not take."""
    slots = score.shape[-1]
    if slots > MOST_TILE and capacity > MOST_WANTED:
        raise NotImplementedError(
            f"got capacity {capacity} for rows of {slots}, expected at most {MOST_WANTED} for rows of more than {MOST_TILE}"
        )
    if lse is not None and score.shape[2] > MOST_HEADS:
        raise NotImplementedError(f"got logits of {score.shape[2]} query heads, expected at most {MOST_HEADS}")
    if slots > 2**28 or score.size == 0:
        raise NotImplementedError(f"got score {score.shape}, expected rows of 1 to {2**28}")
