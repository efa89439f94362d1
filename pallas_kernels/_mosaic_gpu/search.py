"""The k-th largest of keys that lie in the registers of one program, or of the programs of a cluster."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._triton.kth_search import ALL, INFINITE, NEVER, SPREAD, bounds_of, hits_of

HALF = 2**16 - 1
MOST = 2**14 + 2**12  # keys of a program: they are in registers, and counts of two kinds share a word


def threshold_of(key: jax.Array, wanted: Any, parts: int, peers: Any, repeated: bool = False) -> tuple[Any, Any, Any]:
    """Find the threshold that the best keys reach.

    Args:
        key: int32 [N], this program's; N is at most `MOST`.
        wanted: int32, keys to choose of all programs.
        parts: programs of the cluster.
        peers: shared memory for `arrays.of_parts`.
        repeated: see `kth_search.find`.

    Returns:
        int32: the threshold; how many of the keys that equal it are chosen, from the first on; how many keys are chosen.
    """

    def together(fold, *numbers):
        return [functools.reduce(fold, column) for column in zip(*arrays.of_parts(list(numbers), peers, parts), strict=True)]

    def counts(pivots):  # of keys that are at least as large, two in a word
        words = [jnp.sum(hits_of(key, *pivots[i : i + 2])) for i in range(0, len(pivots), 2)]
        halves = [[y for x in column for y in (x & HALF, x >> 16)] for column in arrays.of_parts(words, peers, parts)]
        return [functools.reduce(jnp.add, column) for column in zip(*halves, strict=True)]

    def below(pivot):
        return together(jnp.maximum, jnp.max(jnp.where(key < pivot, key, NEVER)))[0]

    low, high, held, infinite = bounds_of(key)
    if parts > 1:
        high = jnp.where(low < INFINITE, high, NEVER + 1)  # a program may have no finite key
        negative, high = together(jnp.maximum, -low, high)
        low, (held, infinite) = -negative, together(jnp.add, held, infinite)
        high = jnp.maximum(high, low + 1)
    threshold, reach, over = _find(counts, below, low, high, held, wanted, infinite, repeated)
    return threshold, jnp.where(reach > wanted, wanted - over, ALL), jnp.minimum(held, wanted)


def _find(counts, below, low, high, held, wanted, infinite, repeated):
    """Find the highest threshold that ``wanted`` keys reach, how many reach it, and how many exceed it.

    As `kth_search.find`, whose arguments these are, but each step counts the keys that reach six pivots: a step waits longer
    than it counts, and so there are half as many. Three pivots quarter the interval, and three are about the expected key.
    """

    def unsettled(state):
        low, high, reach, *_ = state
        return (reach > wanted) & (wanted > 0) & (high > low + 1)

    def narrow(state):
        low, high, reach, over, step = state
        half = (high >> 1) - (low >> 1)  # the width itself may exceed int32
        wide, number = half.astype(jnp.float32), (reach - over).astype(jnp.float32)
        jump = low + 2 * ((reach - wanted).astype(jnp.float32) / number * wide).astype(jnp.int32)
        aside, quarter = (SPREAD * wide * lax.rsqrt(number)).astype(jnp.int32), low + (half >> 1)
        exists = (step & 1 == 1) if repeated else (step >= 4) & (step & 3 == 3)

        def next_key():  # the greatest key of the interval, and what is behind it
            key = jnp.maximum(below(high), low)
            return key, key + 1

        first = lax.cond(exists, next_key, lambda: (quarter, quarter + half))
        guesses = *first, low + half, jump - aside, jump, jump + aside
        pivots = [jnp.minimum(jnp.maximum(x, low + 1), high - 1) for x in guesses]
        found = counts(pivots)
        enough = [x >= wanted for x in found]
        for pivot, count, more in zip(pivots, found, enough, strict=True):
            low, reach = jnp.where(more, jnp.maximum(low, pivot), low), jnp.where(more, jnp.minimum(reach, count), reach)
            high, over = jnp.where(more, high, jnp.minimum(high, pivot)), jnp.where(more, over, jnp.maximum(over, count))
        return low, high, reach, over, step + 1

    low, high, held, over = (jnp.asarray(x, jnp.int32) for x in (low, high, held, infinite))
    # Where enough keys are infinite, infinity is the threshold, and the loop ends before its first step.
    forced = over >= jnp.maximum(wanted, 1)
    low, high = jnp.where(forced, INFINITE, low), jnp.where(forced, INFINITE + 1, high)
    held, over = jnp.where(forced, over, held), jnp.where(forced, 0, over)
    low, _, reach, over, _ = lax.while_loop(unsettled, narrow, (low, high, held, over, jnp.int32(0)))
    return low, reach, over


def places(
    key: jax.Array, threshold: Any, ties: Any, part: Any, parts: int, words: Any, peers: Any
) -> tuple[jax.Array, jax.Array]:
    """Rank this program's keys: which reach the threshold, bool [N], and where these go in the list of all, int32 [N].

    Args:
        key: int32 [N]; the keys are in order (`arrays.in_order`), and the programs of a cluster too.
        threshold: int32.
        ties: int32, how many keys that equal it are chosen.
        part: which program of the cluster this is.
        parts: programs of the cluster.
        words: shared memory for `arrays.before`, int32 [4].
        peers: shared memory for `arrays.of_parts`.
    """
    more, same = key > threshold, key == threshold
    word = more.astype(jnp.int32) + (same.astype(jnp.int32) << 16)
    earlier = arrays.before(word, words)
    over = equal = jnp.int32(0)
    if parts > 1:
        total = jnp.sum(word)
        for peer, (more_there, same_there) in enumerate(arrays.of_parts([total & 0xFFFF, total >> 16], peers, parts)):
            over, equal = over + jnp.where(peer < part, more_there, 0), equal + jnp.where(peer < part, same_there, 0)
    equal = equal + (earlier >> 16)
    return more | (same & (equal < ties)), over + (earlier & 0xFFFF) + jnp.minimum(equal, ties)
