"""The k-th largest of keys that lie in the registers of one program, or of the programs of a cluster."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._triton.kth_search import ALL, INFINITE, NEVER, bounds_of, find, hits_of, pair_of

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

    def count(pivot):
        return together(jnp.add, jnp.sum((key >= pivot).astype(jnp.int32)))[0]

    def pair(left, right):
        return tuple(together(jnp.add, *pair_of(hits_of(key, left, right))))

    def below(pivot):
        return together(jnp.maximum, jnp.max(jnp.where(key < pivot, key, NEVER)))[0]

    low, high, held, infinite = bounds_of(key)
    if parts > 1:
        high = jnp.where(low < INFINITE, high, NEVER + 1)  # a program may have no finite key
        negative, high = together(jnp.maximum, -low, high)
        low, (held, infinite) = -negative, together(jnp.add, held, infinite)
        high = jnp.maximum(high, low + 1)
    slack = jnp.where(wanted > 0, 0, ALL)
    threshold, reach, over = find(count, below, low, high, held, wanted, slack, infinite, pair, repeated)
    return threshold, jnp.where(reach > wanted, wanted - over, ALL), jnp.minimum(held, wanted)


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
