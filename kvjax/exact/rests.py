"""Rests of `kvjax.Verified`: when its draft rests, and how Full decodes alone until the draft is tried again.

A rest's steps run in loops, and a loop whose number of turns only the device knows makes the host wait for each turn: the
device idles until the host has launched the next one. So most steps run in inner loops of a known number of turns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.decoding.decode import Decoded, run_step
from kvjax.decoding.progress import Call, active_rows, goes_on, largest, left_tokens, next_token, written
from kvjax.exact.verified_alone import alone, can_wait, told, waking_rounds
from kvjax.exact.verified_layer import Passes
from pallas_kernels import axes

_REST, _LONGEST_REST = 128, 1024  # tokens that Full decodes alone after the draft has failed: first, and at most
_BLOCK = 64  # most steps of a rest after which the draft is told of the tokens
_MOST, _FEW = 32, 4  # steps of an inner loop, and the same where rows may end: it goes on after the last row's end


def alone_steps(limits: Array | None, now: Decoded) -> Array:
    """Count the steps of Full alone that come next, for all rows on all devices: an int32 scalar.

    The last tokens of a rest come from rounds without drafted tokens, see `waking_rounds`.
    """
    rest = largest(limits, now, cast("Passes", now.cache.shared).rest) - waking_rounds(now.cache)
    return jnp.clip(rest, 0, largest(limits, now, left_tokens(limits, now)))


def run_alone(call: Call, now: Decoded) -> Decoded:
    """Decode some tokens of each row with Full, and tell the draft of them: at the end if it can wait, else one by one."""
    before, limits, most = now, call.limits, min(_BLOCK, now.tokens.shape[1])
    unit, last = min(_FEW if call.may_end else _MOST, most), now.step + jnp.minimum(alone_steps(limits, now), most)
    waits = can_wait(before.cache, most)

    def step(_: Array, now: Decoded) -> Decoded:
        active = active_rows(limits, now)
        token, bad = next_token(call.sampler, call.draws, active, now)
        cache = run_step(call.params, now.cache, token[:, None], active[:, None])
        now = dataclasses.replace(now, cache=cache, bad_step=bad)
        return written(now, token[:, None], active, jnp.zeros_like(now.num_tokens), call.eos, limits)

    def room(size: int) -> Callable[[Decoded], Array]:
        return lambda now: goes_on(limits, now) & (now.step + size <= last)

    if waits:
        now = dataclasses.replace(now, cache=alone(now.cache))
    with jax.named_scope("alone"):
        for size in dict.fromkeys((unit, 1)):
            now = lax.while_loop(room(size), lambda now, size=size: lax.fori_loop(0, size, step, now), now)
    count = now.num_tokens - before.num_tokens
    cache = told(before.cache, now.cache, count, most) if waits else now.cache
    passes = cast("Passes", cache.shared)
    rest = jnp.maximum(passes.rest - (now.step - before.step), waking_rounds(cache))
    passes = dataclasses.replace(passes, passes=passes.passes + count, rest=jnp.where(passes.rest > 0, rest, 0))
    return dataclasses.replace(now, cache=dataclasses.replace(cache, shared=passes))


def rate_of(passes: Passes, active: Array) -> Array:
    """Average the rate of agreement of the rows that are ``active`` bool [B], on all devices: a float32 scalar."""
    count = jnp.maximum(axes.total(jnp.sum(active, dtype=jnp.float32), axes.DATA), 1)
    return axes.total(jnp.sum(jnp.where(active, passes.rate, 0)), axes.DATA) / count


def rested(
    passes: Passes, active: Array, wanted: Array, accepted: Array, worth: float | Array, waking: int = 0
) -> Passes:
    """Let the draft rest if not even its first token is worth its step, in the rows that are ``active`` bool [B].

    A rest is four times as long as the rest before, up to a limit, unless the tokens since then were worth their steps.

    Args:
        passes: with the round.
        active: bool [B].
        wanted: int32 [B], tokens drafted in this round; no round without them begins a rest.
        accepted: int32 [B], tokens kept.
        worth: as in `Verified`.
        waking: tokens that a rest has more, see `waking_rounds`.
    """
    compared = jnp.minimum(accepted + 1, wanted)
    count = axes.total(jnp.sum(jnp.where(active, compared, 0)).astype(jnp.float32), axes.DATA)
    kept = axes.total(jnp.sum(jnp.where(active, accepted, 0)).astype(jnp.float32), axes.DATA)
    fails = (count > 0) & (rate_of(passes, active) < worth)
    longer = jnp.where(kept < worth * count, jnp.clip(4 * passes.last_rest, _REST, _LONGEST_REST), _REST)
    last = jnp.where(fails, longer, jnp.where(count > 0, 0, passes.last_rest))
    return dataclasses.replace(passes, rest=jnp.where(fails, longer + waking, passes.rest), last_rest=last)
