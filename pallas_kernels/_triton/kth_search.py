"""The steps of a kernel that finds the k-th largest number of a set: keys that keep the order, the search, the ranks.

They are written for values inside a Pallas Triton kernel, but they are plain functions of arrays. A key is an int32 whose
order is the order of the float32 scores.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

NEVER = -(2**31)  # key of an entry that is never chosen: a score of -inf or NaN, or no entry at all
LOWEST = -(2**31) + 2**23  # key of the most negative finite float32
INFINITE = 0x7F800000  # key of +inf
ALL = 2**30  # more than any row holds
SPREAD = 0.6  # distance of two pivots from the interpolated one: times the interval's width, over the root of its keys


def order_key(score: jax.Array) -> jax.Array:
    """Map float32 scores to int32 keys of the same order; -0 and 0 share a key, -inf and NaN get ``NEVER``."""
    bits = lax.bitcast_convert_type(score, jnp.int32)
    # -0 has the bits of NEVER and must equal 0. Mosaic GPU would compare without signs if the constant came first.
    bits = jnp.where(bits != NEVER, bits, 0)
    # Positive floats have the order of their bits. Negative ones have the reverse: flip all bits but the sign.
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return jnp.where(score > -jnp.inf, key, NEVER)


def bounds_of(key: jax.Array) -> tuple[Any, Any, Any, Any]:
    """Compute what a search over keys int32 [N] begins with; N is at most 2**14.

    Returns:
        int32 scalars: the least finite key; a number above the greatest finite key; the number of keys that may be chosen;
        the number of infinite keys among them.
    """
    may = key > NEVER
    finite = may & (key < INFINITE)
    low = jnp.min(jnp.where(finite, key, INFINITE))
    high = jnp.max(jnp.where(finite, key, NEVER))
    # One reduction gives both counts: one in the low half of a word, one in the high half.
    counts = jnp.sum(may.astype(jnp.int32) + ((key >= INFINITE).astype(jnp.int32) << 16))
    return low, jnp.maximum(high, low) + 1, counts & 0xFFFF, counts >> 16


def pair_of(hits: jax.Array) -> tuple[Any, Any]:
    """Sum the low and the high halves of words ``hits`` [N] by one reduction; both sums are below 2**15."""
    both = jnp.sum(hits)
    return both & 0xFFFF, both >> 16


def hits_of(key: jax.Array, left: Any, right: Any) -> jax.Array:
    """Make words int32 [N] for `pair_of`: the low half is ``key >= left``, the high half is ``key >= right``."""
    return (key >= left).astype(jnp.int32) + ((key >= right).astype(jnp.int32) << 16)


def find(
    count: Callable[[Any], Any],
    below: Callable[[Any], Any],
    low: Any,
    high: Any,
    held: Any,
    wanted: Any,
    slack: Any,
    infinite: Any = 0,
    pair: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    repeated: bool = False,
) -> tuple[Any, Any, Any]:
    """Find a threshold that ``wanted`` to ``wanted + slack`` keys reach; a key reaches it by being at least as large.

    Where equal keys allow no such threshold, the result is the highest threshold that at least ``wanted`` keys reach. The
    interval [low, high) always holds the wanted key. Pivots are interpolated between the counts at its ends: random scores
    need some 11 counts, where bisection needs 17. A step that did not halve the interval is followed by a step that does.
    In a long search every fourth step goes to the next key that exists, which ends long runs of equal keys.

    Args:
        count: a function from a number to how many keys are at least as large.
        below: a function from a number to the largest key less than it.
        low: int32, the least key.
        high: int32, above the greatest key.
        held: int32, ``count(low)``.
        wanted: int32, at least 1. If ``held`` is at most ``wanted + slack``, the threshold is ``low``.
        slack: int32, at least 0.
        infinite: int32, how many keys lie at ``high`` or above. These are the infinite keys, by which callers force entries.
            They would spoil the interpolation, so ``low`` and ``high`` bound only the finite keys.
        pair: ``count`` of two ascending numbers, for little more than the price of one count. Two pivots then enclose the
            expected key, each as far away as the error of the estimate is likely to be. This needs two thirds of the steps.
        repeated: many keys are equal, and few different ones lie in the interval. Then every second step, the first one among
            them, goes to the next key that exists.

    Returns:
        int32 scalars: the threshold, how many keys reach it, and how many exceed it. The count of exceeding keys is exact
        where more than ``wanted + slack`` keys reach the threshold, and must not be used elsewhere.
    """

    def unsettled(state):
        low, high, reach, _, _, _ = state
        return (reach > wanted + slack) & (high > low + 1)

    def narrow(state):
        low, high, reach, over, slow, step = state
        half = (high >> 1) - (low >> 1)  # half of the interval's width: the width itself may exceed int32
        # The share of the keys in the interval that lie below the wanted key says how far the pivot goes into it.
        aim = wanted + (slack >> 1)
        wide, number = half.astype(jnp.float32), (reach - over).astype(jnp.float32)
        part = (reach - aim).astype(jnp.float32) / number
        jump = jnp.where(slow, half, 2 * (part * wide).astype(jnp.int32))
        guesses = [low + jump]
        if pair is not None:
            aside = jnp.where(slow, half >> 1, (SPREAD * wide * lax.rsqrt(number)).astype(jnp.int32))
            guesses = [low + jump - aside, low + jump + aside]
        guesses = [jnp.minimum(jnp.maximum(x, low + 1), high - 1) for x in guesses]
        # A sum above may have wrapped around, so the two may be in the wrong order.
        guess = functools.reduce(jnp.minimum, guesses), functools.reduce(jnp.maximum, guesses)
        exists = (step & 1 == 0) if repeated else (step >= (12 if pair is None else 7)) & (step & 3 == 3)

        def next_key():
            key = jnp.maximum(below(high), low)  # the greatest key of the interval
            return key, key

        left, right = lax.cond(exists, next_key, lambda: guess)
        some, fewer = (count(left),) * 2 if pair is None else pair(left, right)
        enough, more = some >= wanted, fewer >= wanted
        # Keep the part that holds the wanted key: [right, high), [left, right) or [low, left). A pivot that is the greatest
        # key of the interval has no key between itself and `high`, so the interval can end right behind it.
        top = jnp.where(exists, right + 1, high)
        next_low = jnp.where(more, right, jnp.where(enough, left, low))
        next_high = jnp.where(more, top, jnp.where(enough, right, left))
        reach = jnp.where(more, fewer, jnp.where(enough, some, reach))
        over = jnp.where(more, over, jnp.where(enough, fewer, some))
        slow = ((next_high >> 1) - (next_low >> 1)) > (half >> 1)
        return next_low, next_high, reach, over, slow, step + 1

    # The types of the loop's state must not depend on how the caller made its numbers.
    low, high, held, over = (jnp.asarray(x, jnp.int32) for x in (low, high, held, infinite))
    # Where enough keys are infinite, infinity is the threshold, and the loop ends before its first step.
    forced = over >= jnp.maximum(wanted, 1)
    low, high = jnp.where(forced, INFINITE, low), jnp.where(forced, INFINITE + 1, high)
    held, over = jnp.where(forced, over, held), jnp.where(forced, 0, over)
    state = (low, high, held, over, jnp.bool_(False), jnp.int32(0))
    low, _, reach, over, _, _ = lax.while_loop(unsettled, narrow, state)
    return low, reach, over


def rank(key: jax.Array, threshold: Any, ties: Any, over: Any, equal: Any) -> tuple[jax.Array, jax.Array, Any, Any]:
    """Rank a block's keys: which are kept, where each goes in the list, and the counts that the next block starts from.

    Args:
        key: int32 [N] in slot order; N at most 2**14.
        threshold: int32; greater keys are kept.
        ties: int32, how many keys equal to the threshold are kept, from the lowest slot up.
        over: int32, keys of earlier blocks that exceed the threshold.
        equal: int32, keys of earlier blocks that equal it.

    Returns:
        keep bool [N], place int32 [N] (of kept keys), over, equal.
    """
    more, same = key > threshold, key == threshold
    # One prefix sum for two counts: greater keys in the low half of a word, equal keys in the high half.
    one = more.astype(jnp.int32) + (same.astype(jnp.int32) << 16)
    before = lax.cumsum(one, axis=0) - one
    total = jnp.sum(one)
    # A kept key comes behind all greater keys and all kept equal keys of lower slots.
    same_before = equal + (before >> 16)
    place = over + (before & 0xFFFF) + jnp.minimum(same_before, ties)
    return more | (same & (same_before < ties)), place, over + (total & 0xFFFF), equal + (total >> 16)
