"""The best of many keys by one program that holds only a part of them: keys come in chunks whose greatest keys are known.

The first search is over the greatest key of each chunk, the second over the keys of the chunks that the first search chose.
The b best keys are all in the b chosen chunks: a key in another chunk has b keys before it, one in each chosen chunk.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._triton.kth_histogram import MOST_BINS, narrowed
from pallas_kernels._triton.kth_search import NEVER, bounds_of, find, rank
from pallas_kernels._triton.pallas import pl, plt

CHUNKS = 64, 32, 16, 8, 4, 2


def held(keys: int, best: int, chunk: int) -> tuple[int, int]:
    """Count the entries of the searches for the ``best`` of ``keys``: chunks (0 if a first search saves nothing), keys."""
    chosen = pl.next_power_of_2(best) * chunk
    if chosen >= keys:
        return 0, max(pl.next_power_of_2(keys), 16)
    return max(pl.next_power_of_2(pl.cdiv(keys, chunk)), 16), chosen


def chunk_for(keys: int, best: int, most: int) -> int | None:
    """Choose the keys per chunk that leave the fewest entries; None if every size leaves more than ``most``."""
    chunks = [chunk for chunk in CHUNKS if max(held(keys, best, chunk)) <= most]
    return min(chunks, key=lambda chunk: sum(held(keys, best, chunk))) if chunks else None


def best_of(key: jax.Array, wanted: Any, slack: Any, threads: int, interpret: bool) -> tuple[jax.Array, jax.Array, Any, Any]:
    """Select the ``wanted`` best of the keys int32 [E], or all if there are fewer; up to ``slack`` more make it faster.

    Returns:
        bool [E], true for the best keys; int32 [E], the place of each best key in a list of them by index; int32, their
        number; int32, a threshold that they all reach.
    """
    threshold, number, ties = threshold_of(key, wanted, slack, threads, interpret)
    keep, place, _, _ = rank(key, threshold, ties, jnp.int32(0), jnp.int32(0))
    return keep & (place < number), place, number, threshold


def threshold_of(
    key: jax.Array, wanted: Any, slack: Any, threads: int, interpret: bool, repeated: bool = False
) -> tuple[Any, Any, Any]:
    """Find the threshold of `best_of`; return it, the number of best keys, and how many of them equal the threshold.

    Keys above the threshold are all among the best, unless none is wanted. ``repeated``: see `kth_search.find`.
    """
    low, high, number, infinite = bounds_of(key)

    def count(pivot):
        return jnp.sum((key >= pivot).astype(jnp.int32), dtype=jnp.int32)

    def below(pivot):
        return jnp.max(jnp.where(key < pivot, key, NEVER))

    chosen = jnp.minimum(number, wanted)
    least, interval = jnp.maximum(chosen, 1), (low, high, number, infinite)
    # A histogram narrows the interval first, unless there are no more keys than wanted.
    if threads <= key.shape[0] <= MOST_BINS:
        inner = narrowed(key, low, high, number, least, threads, interpret)
        interval = [jnp.where(number > wanted + slack, x, y) for x, y in zip(inner, interval, strict=True)]
    *interval, over = interval
    threshold, reach, over = find(count, below, *interval, least, slack, over, repeated=repeated)
    many = reach > chosen + slack  # more keys equal the threshold than are needed: the first of them are taken
    return threshold, jnp.where(many, chosen, reach), jnp.where(many, chosen - over, reach)


def contenders(
    key_ref, most_ref, found_ref, wanted: Any, chunk: int, entries: tuple[int, int], threads: int, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """Run the first search, and gather the keys that the second search is over.

    Args:
        key_ref: int32 [N].
        most_ref: int32 [N / chunk], the greatest key of each chunk; None where there is no first search.
        found_ref: int32 [E / chunk], where the chosen chunks are written; None where there is no first search.
        wanted: int32, the number of keys that the second search looks for.
        chunk: keys per chunk.
        entries: the result of `held`; E is its second number.
        threads: number of threads of the program.
        interpret: compute without assembly.

    Returns:
        int32 [E], indices of keys, ascending; and the keys, int32 [E], ``NEVER`` where there is no key or it is not among
        the best.
    """
    entry, least = jnp.arange(entries[1], dtype=jnp.int32), NEVER
    known = entry < key_ref.shape[0]
    if entries[0]:
        room, block = entries[1] // chunk, jnp.arange(entries[0], dtype=jnp.int32)
        most = plt.load(most_ref.at[block], mask=block < most_ref.shape[0], other=NEVER)
        keep, place, number, threshold = best_of(most, wanted, room - wanted, threads, interpret)
        plt.store(found_ref.at[place], block, mask=keep)
        if not interpret:
            plt.debug_barrier()  # the second search reads chunks that other threads of this program wrote
        # With enough chunks, no key below their threshold can be among the best.
        least = jnp.where(number >= wanted, threshold, NEVER)
        block = entry // chunk  # the keys of the chosen chunks, in order
        known = block < number
        entry = plt.load(found_ref.at[block], mask=known, other=0) * chunk + entry % chunk
    key = plt.load(key_ref.at[entry], mask=known, other=NEVER)
    return entry, jnp.where(key >= least, key, NEVER)
