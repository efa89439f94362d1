"""The last steps of a selection by one program: search the threshold among its entries, and write the list."""

import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.kth_search import ALL, INFINITE, NEVER, bounds_of, find, hits_of, pair_of, rank
from pallas_kernels._triton.pallas import pl, plt


def list_best(first, first_slots, load, tiles, wanted, list_ref, among=None):
    """Search the threshold of the best ``wanted`` entries, and write their slots in ascending order.

    Entries come in tiles of N keys. The first tile stays in registers; each count reads all other tiles again.

    Args:
        first: int32 [N], keys of the first tile, ``NEVER`` behind the last entry.
        first_slots: a function that returns the slots of the first tile, int32 [N].
        load: a function from a tile's index to its keys and a function for its slots; None if there is one tile.
        tiles: int32, number of tiles.
        wanted: int32, entries to list.
        list_ref: int32 [K], where the slots are written.
        among: the least key, a number above the greatest finite key, and how many keys there are; None computes them.

    Returns:
        int32, how many entries are listed.
    """
    tile, alone = first.shape[0], load is None

    def over_tiles(fold, start=0):  # a fold per thread over all tiles; the caller reduces over threads once, at the end
        start = fold(first, jnp.full((tile,), start, jnp.int32))
        return start if alone else lax.fori_loop(1, tiles, lambda i, carry: fold(load(i)[0], carry), start)

    def count(pivot):
        return jnp.sum(over_tiles(lambda key, hits: hits + (key >= pivot).astype(jnp.int32)))

    def pair(left, right):
        def packed():
            return pair_of(over_tiles(lambda key, hits: hits + hits_of(key, left, right)))

        # Two counts fit into one word up to 2**15 entries; one tile never has more.
        return packed() if alone else lax.cond(held < 2**15, packed, lambda: (count(left), count(right)))

    def below(pivot):
        return jnp.max(over_tiles(lambda key, best: jnp.maximum(best, jnp.where(key < pivot, key, NEVER)), NEVER))

    low, high, held, infinite = bounds_of(first) if among is None else (*among, count(INFINITE))
    threshold, reach, over = find(count, below, low, high, held, wanted, 0, infinite, pair)
    ties = jnp.where(reach > wanted, wanted - over, ALL)
    chosen = jnp.minimum(held, wanted)

    def write(key, slot, over, equal):
        keep, place, over, equal = rank(key, threshold, ties, over, equal)
        plt.store(list_ref.at[place], slot, mask=keep & (place < chosen))
        return over, equal

    # Tiles are written in slot order until enough entries are listed: ranks continue from tile to tile.
    begun = write(first, first_slots(), jnp.int32(0), jnp.int32(0))
    if not alone:

        def unwritten(carry):
            step, over, equal = carry
            return (step < tiles) & (over + jnp.minimum(equal, ties) < chosen)

        def write_tile(carry):
            key, slots = load(carry[0])
            return carry[0] + 1, *write(key, slots(), *carry[1:])

        lax.while_loop(unwritten, write_tile, (jnp.int32(1), *begun))

    return chosen


def finish(chosen, list_ref, keep_ref, count_ref):
    """Write zeros behind the list, the mask of its entries, and its length ``chosen``."""
    capacity = list_ref.shape[0]
    block = min(4096, pl.next_power_of_2(capacity))

    def fill(step, _):
        at = step * block + jnp.arange(block, dtype=jnp.int32)
        plt.store(list_ref.at[at], jnp.zeros((block,), jnp.int32), mask=(at >= chosen) & (at < capacity))
        plt.store(keep_ref.at[at], at < chosen, mask=at < capacity)
        return _

    lax.fori_loop(0, pl.cdiv(capacity, block), fill, jnp.int32(0))
    count_ref[0] = chosen
