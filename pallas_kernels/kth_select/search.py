"""The parts of a kernel that finds the k-th largest of a set: order-preserving keys, the search, ranks of what is kept.

Written for values inside a Pallas Triton kernel, but they are plain functions of arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

NEVER = -(2**31)  # key of what is never chosen: -inf, NaN, nothing there
LOWEST = -(2**31) + 2**23  # key of the most negative finite float32
INFINITE = 0x7F800000  # key of +inf
ALL = 2**30  # more than any row holds
SPREAD = 0.6  # of two pivots about an interpolated one, in widths of the interval over the root of the keys in it


def order_key(score: jax.Array) -> jax.Array:
    """int32 keys in the order of float32 scores; -0 and 0 have one key, -inf and NaN have ``NEVER``."""
    bits = lax.bitcast_convert_type(score, jnp.int32)
    bits = jnp.where(bits == NEVER, 0, bits)  # the bits of -0
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return jnp.where(score > -jnp.inf, key, NEVER)


def bounds_of(key: jax.Array) -> tuple[Any, Any, Any, Any]:
    """Least finite key, more than the greatest finite one, keys that may be chosen, infinite ones among them; of keys [N].

    N is at most 2**14.
    """
    may = key > NEVER
    finite = may & (key < INFINITE)
    low = jnp.min(jnp.where(finite, key, INFINITE))
    high = jnp.max(jnp.where(finite, key, NEVER))
    # Both counts in one: low and high half of a word.
    counts = jnp.sum(may.astype(jnp.int32) + ((key >= INFINITE).astype(jnp.int32) << 16))
    return low, jnp.maximum(high, low) + 1, counts & 0xFFFF, counts >> 16


def pair_of(hits: jax.Array) -> tuple[Any, Any]:
    """Sums of the low and of the high halves of the words ``hits`` [N], each below 2**15: two counts for one reduction."""
    both = jnp.sum(hits)
    return both & 0xFFFF, both >> 16


def hits_of(key: jax.Array, left: Any, right: Any) -> jax.Array:
    """For `pair_of`: whether ``key`` [N] is at least ``left``, and whether at least ``right``, int32 [N]."""
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
) -> tuple[Any, Any, Any]:
    """A threshold that ``wanted`` to ``wanted + slack`` keys reach, or, among equal keys, the last that enough reach.

    The interval [low, high) always holds the wanted key. Pivots are interpolated between the counts at its ends, which on
    random scores needs some 11 counts where bisection needs 17; a step that did not halve the interval is followed by one
    that does, and in a long search every fourth step goes to the next key that exists, which ends long runs of equal keys.

    Args:
        count: how many keys are at least a number.
        below: the largest key less than a number.
        low: int32, the least key.
        high: int32, more than the greatest key.
        held: int32, ``count(low)``.
        wanted: int32, at least 1. If no more than ``wanted + slack`` are held, the threshold is ``low``.
        slack: int32, at least 0.
        infinite: int32, how many keys lie at ``high`` or above: the infinite ones, by which callers force entries and which
            would spoil the interpolation, where the others are bounded without them.
        pair: ``count`` of two ascending numbers at the price of little more than one. Pivots then lie on either side of where
            the wanted key is expected, as far away as it is likely to be: two thirds of the steps.

    Returns:
        int32 scalars: the threshold, how many keys reach it, and how many exceed it. The last is exact where more than
        ``wanted + slack`` reach it, and not to be used otherwise.
    """

    def unsettled(state):
        low, high, reach, _, _, _ = state
        return (reach > wanted + slack) & (high > low + 1)

    def narrow(state):
        low, high, reach, over, slow, step = state
        half = (high >> 1) - (low >> 1)  # the width itself may exceed int32
        aim = wanted + (slack >> 1)
        wide, number = half.astype(jnp.float32), (reach - over).astype(jnp.float32)
        part = (reach - aim).astype(jnp.float32) / number
        jump = jnp.where(slow, half, 2 * (part * wide).astype(jnp.int32))
        guesses = [low + jump]
        if pair is not None:
            aside = jnp.where(slow, half >> 1, (SPREAD * wide * lax.rsqrt(number)).astype(jnp.int32))
            guesses = [low + jump - aside, low + jump + aside]
        guesses = [jnp.minimum(jnp.maximum(x, low + 1), high - 1) for x in guesses]
        # A sum above may have wrapped around.
        guess = functools.reduce(jnp.minimum, guesses), functools.reduce(jnp.maximum, guesses)
        exists = (step >= (12 if pair is None else 7)) & (step & 3 == 3)

        def next_key():
            key = jnp.maximum(below(high), low)
            return key, key

        left, right = lax.cond(exists, next_key, lambda: guess)
        some, fewer = (count(left),) * 2 if pair is None else pair(left, right)
        enough, more = some >= wanted, fewer >= wanted
        # No key lies between an existing pivot and `high`.
        top = jnp.where(exists, right + 1, high)
        next_low = jnp.where(more, right, jnp.where(enough, left, low))
        next_high = jnp.where(more, top, jnp.where(enough, right, left))
        reach = jnp.where(more, fewer, jnp.where(enough, some, reach))
        over = jnp.where(more, over, jnp.where(enough, fewer, some))
        slow = ((next_high >> 1) - (next_low >> 1)) > (half >> 1)
        return next_low, next_high, reach, over, slow, step + 1

    # The types of the loop's state must not depend on how the caller made its numbers.
    low, high, held, over = (jnp.asarray(x, jnp.int32) for x in (low, high, held, infinite))
    forced = over >= jnp.maximum(wanted, 1)  # then infinity is the threshold
    low, high = jnp.where(forced, INFINITE, low), jnp.where(forced, INFINITE + 1, high)
    held, over = jnp.where(forced, over, held), jnp.where(forced, 0, over)
    state = (low, high, held, over, jnp.bool_(False), jnp.int32(0))
    low, _, reach, over, _, _ = lax.while_loop(unsettled, narrow, state)
    return low, reach, over


def rank(key: jax.Array, threshold: Any, ties: Any, over: Any, equal: Any) -> tuple[jax.Array, jax.Array, Any, Any]:
    """Which keys of a block are kept, where each goes in the list, and the counts that the next block starts from.

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
    # Two prefix sums in one: low and high half of a word.
    one = more.astype(jnp.int32) + (same.astype(jnp.int32) << 16)
    before = lax.cumsum(one, axis=0) - one
    total = jnp.sum(one)
    same_before = equal + (before >> 16)
    place = over + (before & 0xFFFF) + jnp.minimum(same_before, ties)
    return more | (same & (same_before < ties)), place, over + (total & 0xFFFF), equal + (total >> 16)
