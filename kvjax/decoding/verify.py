"""Exact decoding, traced: a draft guesses tokens, and one pass of the model says which of them are Full's (`kvjax.Verified`).

A round begins with the next token, which is drawn from Full's logits. The draft decodes up to ``depth`` tokens behind it.
The pass runs on all of these tokens: each layer stores their exact keys and values and attends as Full does
(`VerifiedLayer.judge`), and the logits of every token give the token that Full draws behind it. The drafted tokens before the
first one that differs are kept; the logits behind the last kept token are the next round's.

What is rolled back, and how:

* The cursor, and the positions of slots. Keys and values of rejected tokens stay where they are, in empty slots, so no large
  array is copied (`kvjax.cache.rewind`).
* Everything else that the draft changes in its steps: metadata, shared state, the small storage of a method that moves slots.
  The draft works on a copy. `VerifiedLayer.commit` tells the true state of the kept tokens, with exact keys and values.

Rows keep different numbers of tokens, so a row's next token has a place of its own in the result. It is drawn with the key
that `kvjax.decoding.decode.run_decode` uses for this place, whatever the passes were.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import Cache
from kvjax.decoding.decode import Decoded, padding_token, run_step, start_decode
from kvjax.decoding.layers import layer_methods, observe
from kvjax.decoding.passes import layer_inputs
from kvjax.decoding.recurrent import run_recurrent
from kvjax.decoding.sampling import Sampler, rows_of
from kvjax.method import LayerMethod, settle_due
from kvjax.typing import EMPTY, attention_soft_cap, method_layers
from kvjax.wrappers.verified import Verified, noted
from kvjax.wrappers.verified_alone import alone, can_wait, told
from kvjax.wrappers.verified_layer import Passes, VerifiedLayer
from pallas_kernels import axes
from pallas_kernels.dispatch import run_shared
from pallas_kernels.soft_cap import soft_cap

_REST, _LONGEST_REST = 64, 1024  # tokens that Full decodes alone after the draft has failed: first, and at most
_BLOCK = 64  # most steps of a rest after which the draft is told of the tokens
_UNIT = 4  # steps of a rest between two looks at its end: their number is known, so a host need not wait for each


def drafts_tokens(cache: Cache) -> bool:
    """Tell whether the cache's method drafts tokens. A model whose layers all have windows leaves nothing to draft."""
    return cache.method.drafts > 0 and cache.shared is not None


def run_verified(
    params: Any,
    cache: Cache,
    sampler: Sampler,
    key: Array | None,
    eos: Array,
    done: Array,
    limits: Array | None = None,
    *,
    steps: int,
    stop_early: bool,
) -> Decoded:
    """Run `kvjax.decoding.decode.run_decode` for a method that drafts tokens; it always ends when all rows have ended."""
    start = start_decode(cache, key, done if limits is None else done | (limits < 1), steps)
    draws, last = (None, None) if key is None else _keys(key, steps)
    step = functools.partial(advance, params, sampler, eos, limits, draws=draws)
    end = lax.while_loop(functools.partial(_goes_on, limits), step, start)
    return dataclasses.replace(end, key=last)


def _keys(key: Array, steps: int) -> tuple[Array, Array]:
    """Return the keys of ``steps`` draws, as `decode_once` splits them off, and the key that is left."""

    def split(key: Array, _: None) -> tuple[Array, Array]:
        draw, key = jax.random.split(key)
        return key, draw

    last, draws = lax.scan(split, key, length=steps)
    return draws, last


def advance(
    params: Any, sampler: Sampler, eos: Array, limits: Array | None, now: Decoded, draws: Array | None = None
) -> Decoded:
    """Run rounds, and blocks of steps of Full alone, each until the other's turn comes; at least one of them.

    Args:
        params: model parameters.
        sampler: draws the tokens.
        eos: int32 [E], tokens that end a row.
        limits: int32 [B], most tokens of each row, or None.
        now: the state before.
        draws: N keys, one for each place of the result; None if nothing is drawn at random.
    """

    given = params, sampler, eos, limits, draws
    rounds = functools.partial(_round, *given)
    if cast("Verified", now.cache.method).worth is None:
        return lax.while_loop(functools.partial(_goes_on, limits), rounds, now)

    def rests(now: Decoded) -> Array:
        return _goes_on(limits, now) & (_units(limits, now) > 0)

    def tries(now: Decoded) -> Array:
        return _goes_on(limits, now) & (_units(limits, now) == 0)

    return lax.while_loop(tries, rounds, lax.while_loop(rests, functools.partial(_block, *given), now))


def _left(limits: Array | None, now: Decoded) -> Array:
    """Count the tokens that each row may still get: int32 [B]."""
    return (now.tokens.shape[1] if limits is None else limits) - now.num_tokens


def _active(limits: Array | None, now: Decoded) -> Array:
    """Mark the rows that get more tokens: bool [B]. A row that only has as many as this call may give it is not done."""
    return ~now.done & (_left(limits, now) > 0)


def _goes_on(limits: Array | None, now: Decoded) -> Array:
    """Tell whether any row, on any device, gets more tokens: a bool scalar."""
    return ~axes.every(~_active(limits, now).any())


def _unit(now: Decoded) -> int:
    """Return the steps of Full alone that run without a look at the rest's end; a call for fewer tokens has fewer."""
    return min(_UNIT, now.tokens.shape[1])


def _units(limits: Array | None, now: Decoded) -> Array:
    """Count the units of steps of Full alone that come next, for all rows on all devices: an int32 scalar.

    A rest is some units and one token more, which is a round without drafted tokens: it shows the draft what Full attends to
    now. Rounds without drafted tokens also end a call in which there is no room for a unit.
    """
    passes, unit = cast("Passes", now.cache.shared), _unit(now)
    rest, left = _largest(limits, now, passes.rest) - 1, _largest(limits, now, _left(limits, now))
    return jnp.maximum(jnp.minimum(-(-rest // unit), left // unit), 0)


def _largest(limits: Array | None, now: Decoded, count: Array) -> Array:
    """Return the largest ``count`` int32 [B] of the rows, on all devices, that get more tokens: an int32 scalar."""
    return axes.most(jnp.max(jnp.where(_active(limits, now), count, 0)), axes.DATA)


def _depth(limits: Array | None, now: Decoded) -> Array:
    """Choose how many tokens to draft in the next round, for all rows that draft: an int32 scalar."""
    method, passes = cast("Verified", now.cache.method), cast("Passes", now.cache.shared)
    if method.worth is None:
        return jnp.int32(method.depth)
    rate = _rate(passes, _active(limits, now))
    kept = rate ** jnp.arange(1, method.depth + 1, dtype=jnp.float32)
    depth = jnp.maximum(jnp.sum(kept >= method.worth, dtype=jnp.int32), 1)
    return jnp.minimum(depth, _largest(limits, now, _left(limits, now)) - 1)


def _rate(passes: Passes, active: Array) -> Array:
    """Average the rate of agreement of the rows that are ``active`` bool [B], on all devices: a float32 scalar."""
    count = jnp.maximum(axes.total(jnp.sum(active, dtype=jnp.float32), axes.DATA), 1)
    return axes.total(jnp.sum(jnp.where(active, passes.rate, 0)), axes.DATA) / count


def _draw(sampler: Sampler, logits: Array, draws: Array | None, place: Array) -> Array:
    """Draw tokens int32 [B, T] from logits float32 [B, T, V] for the places int32 [B, T] of the result."""
    keys = None
    if draws is not None:
        keys = draws[jnp.minimum(place, len(draws) - 1)]
        row = jnp.broadcast_to(rows_of(len(place))[:, None], place.shape)
        keys = jax.vmap(jax.vmap(jax.random.fold_in))(keys, row)
        keys = keys.reshape(-1, *keys.shape[2:])
    return sampler.draw_each(logits.reshape(-1, logits.shape[-1]), keys).reshape(place.shape)


def _next(sampler: Sampler, draws: Array | None, active: Array, now: Decoded) -> tuple[Array, Array]:
    """Draw the next token int32 [B] of each row, and mark bad logits in `Decoded.bad_step`: int32 [B]."""
    logits = now.cache.logits
    token = _draw(sampler, logits[:, None], draws, now.num_tokens[:, None])[:, 0]
    broken = active & (now.bad_step < 0) & ~jnp.isfinite(logits).all(axis=-1)
    return jnp.where(active, token, padding_token(now.cache.model)), jnp.where(broken, now.num_tokens, now.bad_step)


def _block(
    params: Any, sampler: Sampler, eos: Array, limits: Array | None, draws: Array | None, now: Decoded
) -> Decoded:
    """Decode some tokens of each row with Full, and tell the draft of them: at the end if it can wait, else one by one."""
    before, unit = now, _unit(now)
    most = min(_BLOCK, now.tokens.shape[1]) // unit
    units, steps = jnp.minimum(_units(limits, now), most), most * unit
    waits = can_wait(before.cache, steps)

    def step(_: Array, now: Decoded) -> Decoded:
        active = _active(limits, now)
        token, bad = _next(sampler, draws, active, now)
        cache = run_step(params, now.cache, token[:, None], active[:, None])
        now = dataclasses.replace(now, cache=cache, bad_step=bad)
        return _written(now, token[:, None], active, jnp.zeros_like(now.num_tokens), eos, limits)

    if waits:
        now = dataclasses.replace(now, cache=alone(now.cache))
    with jax.named_scope("alone"):
        now = lax.fori_loop(0, units, lambda _, now: lax.fori_loop(0, unit, step, now), now)
    count = now.num_tokens - before.num_tokens
    cache = told(before.cache, now.cache, count, steps) if waits else now.cache
    passes = cast("Passes", cache.shared)
    rest = jnp.maximum(passes.rest - units * unit, 1)
    passes = dataclasses.replace(passes, passes=passes.passes + count, rest=jnp.where(passes.rest > 0, rest, 0))
    return dataclasses.replace(now, cache=dataclasses.replace(cache, shared=passes))


def _round(
    params: Any,
    sampler: Sampler,
    eos: Array,
    limits: Array | None,
    draws: Array | None,
    now: Decoded,
) -> Decoded:
    """Run a round: the draft decodes tokens, Full reads them, and the tokens that it agrees with are kept."""
    cache, active, most = now.cache, _active(limits, now), now.cache.method.drafts
    first, bad = _next(sampler, draws, active, now)
    # A row's drafted tokens fit its limit, so they also fit its storage.
    wanted = jnp.minimum(_depth(limits, now), _left(limits, now) - 1)
    wanted = jnp.where(active & ~_ends(first, eos) & (cast("Passes", cache.shared).rest == 0), wanted, 0)
    place = now.num_tokens[:, None] + jnp.arange(most + 1, dtype=jnp.int32)[None]
    with jax.named_scope("draft"):  # profiles tell the parts of a round by these names
        tokens, cache = _drafted(params, sampler, draws, cache, first, wanted, place)
    order = jnp.arange(most + 1, dtype=jnp.int32)[None]
    with jax.named_scope("judge"):
        logits, cache, made = _judged(params, cache, tokens, active[:, None] & (order <= wanted[:, None]))
    right = (_draw(sampler, logits[:, :-1], draws, place[:, 1:]) == tokens[:, 1:]) & (order[:, :-1] < wanted[:, None])
    right = right & ~_ends(tokens[:, :-1], eos)
    accepted = jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1)
    broken = ~jnp.isfinite(logits).all(axis=-1) & (order < accepted[:, None])
    worse = (bad < 0) & broken.any(axis=1)
    bad = jnp.where(worse, now.num_tokens + 1 + jnp.argmax(broken, axis=1).astype(jnp.int32), bad)
    with jax.named_scope("commit"):
        cache = _committed(cache, made, logits, wanted, accepted, active)
    passes = noted(cache.shared, wanted, accepted, active)
    worth = cast("Verified", cache.method).worth
    if worth is not None:
        passes = dataclasses.replace(passes, rest=jnp.maximum(passes.rest - 1, 0))
        passes = _rested(passes, active, wanted, accepted, worth)
    now = dataclasses.replace(now, cache=dataclasses.replace(cache, shared=passes), bad_step=bad)
    return _written(now, tokens, active, accepted, eos, limits)


def _rested(passes: Passes, active: Array, wanted: Array, accepted: Array, worth: float | Array) -> Passes:
    """Let the draft rest if not even its first token is worth its step, in the rows that are ``active`` bool [B].

    A rest is twice as long as the rest before, unless the tokens since then were worth their steps.

    Args:
        passes: with the round.
        active: bool [B].
        wanted: int32 [B], tokens drafted in this round; no round without them begins a rest.
        accepted: int32 [B], tokens kept.
        worth: as in `Verified`.
    """
    compared = jnp.minimum(accepted + 1, wanted)
    count = axes.total(jnp.sum(jnp.where(active, compared, 0)).astype(jnp.float32), axes.DATA)
    kept = axes.total(jnp.sum(jnp.where(active, accepted, 0)).astype(jnp.float32), axes.DATA)
    fails = (count > 0) & (_rate(passes, active) < worth)
    longer = jnp.where(kept < worth * count, jnp.clip(2 * passes.last_rest, _REST, _LONGEST_REST), _REST)
    last = jnp.where(fails, longer, jnp.where(count > 0, 0, passes.last_rest))
    return dataclasses.replace(passes, rest=jnp.where(fails, longer + 1, passes.rest), last_rest=last)


def _drafted(
    params: Any, sampler: Sampler, draws: Array | None, cache: Cache, first: Array, wanted: Array, place: Array
) -> tuple[Array, Cache]:
    """Decode ``wanted`` int32 [B] tokens with the draft, behind the token ``first`` int32 [B] of each row.

    Returns:
        The tokens int32 [B, 1 + N], the first one included, and the cache as it was, perhaps with other arrays.
    """
    method, most, pad = cast("Verified", cache.method), cache.method.drafts, padding_token(cache.model)
    tokens = jnp.full(place.shape, pad, jnp.int32).at[:, 0].set(first)

    def step(order: Array, carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
        tokens, view = carry
        fed, asked = (lax.dynamic_slice_in_dim(x, at, 1, 1) for x, at in ((tokens, order), (place, order + 1)))
        drafts = (order < wanted)[:, None]
        view = run_step(params, view, fed, drafts, sync_host=False)
        guess = jnp.where(drafts, _draw(sampler, view.logits[:, None], draws, asked), pad)
        return lax.dynamic_update_slice_in_dim(tokens, guess, order + 1, 1), view

    # A number of steps that is known before the program runs spares the host a wait for each.
    count = most if method.worth is None else axes.most(jnp.max(wanted), axes.DATA)
    tokens, view = lax.fori_loop(0, count, step, (tokens, method.view(cache)))
    methods, runs = cast("tuple[VerifiedLayer, ...]", layer_methods(method, cache.model)), method_layers(cache.model)
    layers = tuple(
        methods[layer].recover(before, after, wanted, most) if layer in runs else before
        for layer, (before, after) in enumerate(zip(cache.layers, view.layers, strict=True))
    )
    return tokens, dataclasses.replace(cache, layers=layers)


def _judged(params: Any, cache: Cache, tokens: Array, active: Array) -> tuple[Array, Cache, list[tuple]]:
    """Run the model on ``tokens`` int32 [B, T] as Full does, without telling the draft.

    Args:
        params: model parameters.
        cache: before the tokens.
        tokens: int32 [B, T].
        active: bool [B, T], False on padding, which comes last in a row.

    Returns:
        The logits of all tokens, float32 [B, T, V]; the cache, whose layers have the tokens; and for each layer its inputs
        and the attention mass, which `_committed` needs. A recurrent layer's inputs are the model's function `advance`.
    """
    methods, runs = layer_methods(cache.method, cache.model), method_layers(cache.model)
    at = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    position = jnp.where(active, at, EMPTY)
    length = cache.length + jnp.sum(active, axis=1, dtype=jnp.int32)

    def attend(layer: int, state: Any, *given: Any, sinks: Array | None = None) -> tuple[Array, tuple]:
        method = methods[layer]
        if method.recurs:  # tokens cannot be taken out of the state, so it stays as it was
            return run_recurrent(state, given, position)[0], (state, given, None)
        q, k, v = given
        inputs = layer_inputs(cache.model, layer, method, q, k, v, position, tokens, cache.shared, None, length, None, sinks)
        if layer in runs:
            judge = cast("VerifiedLayer", method)
            out, state, mass = run_shared(type(judge).judge, judge, state, inputs)
        else:  # a ring forgets the tokens that new ones replace, so it stays as it was
            out, mass = run_shared(type(method).attend, method, state, inputs)[0], None
        return out, (state, inputs, mass)

    with soft_cap(attention_soft_cap(cache.model)):
        logits, made = cache.model.apply(params, tokens, attend, cache.layers)
    layers = tuple(state for state, _, _ in made)
    return logits, dataclasses.replace(cache, layers=layers), [each[1:] for each in made]


def _committed(cache: Cache, made: list[tuple], logits: Array, wanted: Array, accepted: Array, active: Array) -> Cache:
    """Keep the first token and the ``accepted`` int32 [B] tokens behind it of a pass in each row that is ``active``."""
    order = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    kept = active[:, None] & (order <= accepted[:, None])
    rejected = wanted - accepted
    layers: list[Any] = []
    methods, runs = layer_methods(cache.method, cache.model), method_layers(cache.model)
    with soft_cap(attention_soft_cap(cache.model)):
        for layer, (method, state, (inputs, mass)) in enumerate(zip(methods, cache.layers, made, strict=True)):
            if method.recurs:
                layers.append(run_recurrent(state, inputs, jnp.where(kept, 0, EMPTY))[1])
                continue
            inputs = dataclasses.replace(inputs, position=jnp.where(kept, inputs.position, EMPTY))
            layers.append(_stored(method, layer in runs, state, inputs, mass, rejected))
        states = settle_due(methods, tuple(layers))
    last = jnp.take_along_axis(logits, accepted[:, None, None], axis=1)[:, 0]
    count = jnp.sum(kept, axis=1, dtype=jnp.int32)
    before, first = cache.length, cache.logits
    cache = dataclasses.replace(cache, layers=states)
    # A shared state that follows the logits sees them token by token, as in decode steps.
    several = cache.shared.draft is not None
    for seen in range(1, logits.shape[1] + 1) if several else (logits.shape[1],):
        now = jnp.minimum(count, seen)
        logit = logits[:, seen - 1] if several else last
        fresh = (count >= seen) if several else active
        cache = dataclasses.replace(cache, length=before + now, logits=jnp.where(fresh[:, None], logit, cache.logits))
        cache = observe(cache, decoding=True)
    return dataclasses.replace(cache, logits=jnp.where(active[:, None], last, first))


def _stored(method: LayerMethod, verified: bool, state: Any, inputs: Any, mass: Array | None, rejected: Array) -> Any:
    """Store the kept tokens in one layer, and tell its draft of them."""
    if not verified:
        return run_shared(type(method).attend, method, state, inputs)[1]
    layer = cast("VerifiedLayer", method)
    return run_shared(type(layer).commit, layer, state, inputs, mass, rejected)


def _ends(tokens: Array, eos: Array) -> Array:
    """Mark the tokens, int32 of any shape, that end a row."""
    return (tokens[..., None] == eos.reshape((1,) * tokens.ndim + (-1,))).any(axis=-1)


def _written(now: Decoded, tokens: Array, active: Array, accepted: Array, eos: Array, limits: Array | None) -> Decoded:
    """Write the first and the ``accepted`` int32 [B] following ``tokens`` int32 [B, T] of ``active`` rows to the result."""
    order = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    kept = active[:, None] & (order <= accepted[:, None])
    place = jnp.where(kept, now.num_tokens[:, None] + order, now.tokens.shape[1])  # past the end, so it is dropped
    row = jnp.arange(len(tokens))[:, None]
    num_tokens = now.num_tokens + jnp.sum(kept, axis=1, dtype=jnp.int32)
    done = now.done | (kept & _ends(tokens, eos)).any(axis=1)
    return dataclasses.replace(
        now,
        tokens=now.tokens.at[row, place].set(tokens, mode="drop"),
        num_tokens=num_tokens,
        done=done if limits is None else done | (num_tokens >= limits),
        step=now.step + 1,
    )
