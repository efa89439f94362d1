"""Exact decoding, traced: a draft guesses tokens, and one pass of the model says which of them are Full's (`kvjax.Verified`).

A round begins with the next token, which is drawn from Full's logits. The draft decodes up to ``depth`` tokens behind it.
The pass runs on all of these tokens: each layer stores their exact keys and values and attends as Full does
(`VerifiedLayer.judge`), and the logits of every token give the token that Full draws behind it. The drafted tokens before the
first one that differs are kept; the logits behind the last kept token are the next round's.

What is rolled back, and how:

* The cursor, and the positions of slots. Keys and values of rejected tokens stay where they are, in empty slots, so no large
  array is copied (`kvjax.exact.rewind`).
* Everything else that the draft changes in its steps: metadata, shared state, the small storage of a method that moves slots.
  The draft works on a copy. `VerifiedLayer.commit` tells the true state of the kept tokens, with exact keys and values.

Rows keep different numbers of tokens, so a row's next token has a place of its own in the result. It is drawn with the key
that `kvjax.decoding.decode.run_decode` uses for this place, whatever the passes were.
"""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import Cache
from kvjax.decoding.decode import Call, Decoded, padding_token, run_step
from kvjax.decoding.history import Memory
from kvjax.decoding.layers import layer_methods, observe
from kvjax.decoding.passes import layer_inputs
from kvjax.decoding.recurrent import run_recurrent
from kvjax.decoding.settle import settle_due
from kvjax.exact import progress
from kvjax.exact.verified import Verified, noted
from kvjax.exact.verified_layer import Passes, VerifiedLayer
from kvjax.protocol.method import LayerMethod
from kvjax.protocol.typing import EMPTY, attention_soft_cap, is_recurrent, method_layers, position_option
from pallas_kernels import axes
from pallas_kernels.dispatch import run_shared
from pallas_kernels.soft_cap import soft_cap

_TURN = 4  # steps of Full alone in a turn of its loop; at most three come after the last row's end


def drafts_tokens(cache: Cache) -> bool:
    """Tell whether the cache's method drafts tokens. A model whose layers all have windows leaves nothing to draft."""
    return cache.method.drafts > 0 and cache.shared is not None


def run_verified(call: Call, start: Decoded) -> Decoded:
    """Run `kvjax.decoding.decode.run_decode` for a method that drafts tokens; it always ends when all rows have ended.

    Args:
        call: its ``draws`` are made here, from the key of ``start``.
        start: see `kvjax.decoding.decode.start_decode`.
    """
    draws, last = (None, None) if start.key is None else progress.keys_of_draws(start.key, start.tokens.shape[1])
    return dataclasses.replace(advance(dataclasses.replace(call, draws=draws), start), key=last)


def advance(call: Call, now: Decoded) -> Decoded:
    """Run rounds to the end of all rows, or until the draft is not worth its steps; then Full decodes alone.

    Each call tries the draft at least once: a later call's text may suit it.
    """
    limits, worth = call.limits, cast("Verified", now.cache.method).worth
    more, once = functools.partial(progress.goes_on, limits), functools.partial(_round, call)
    if worth is None:
        return lax.while_loop(more, once, now)

    def pays(now: Decoded) -> Array:
        agreed = rate_of(cast("Passes", now.cache.shared), progress.active_rows(limits, now))
        return more(now) & ((now.step == 0) | (agreed >= worth))

    drafted, step = lax.while_loop(pays, once, now), functools.partial(_alone, call)
    with jax.named_scope("alone"):
        # The host waits for the condition of a loop whose length only the device knows, so a turn has several steps.
        return lax.while_loop(more, lambda now: lax.fori_loop(0, _TURN, step, now), drafted)


def rate_of(passes: Passes, active: Array) -> Array:
    """Average the rate of agreement of the rows that are ``active`` bool [B], on all devices: a float32 scalar."""
    count = jnp.maximum(axes.total(jnp.sum(active, dtype=jnp.float32), axes.DATA), 1)
    return axes.total(jnp.sum(jnp.where(active, passes.rate, 0)), axes.DATA) / count


def _alone(call: Call, _: Array, now: Decoded) -> Decoded:
    """Decode one token of each row with Full, and tell the draft of it, so that a later call can draft."""
    active = progress.active_rows(call.limits, now)
    token, bad, seen, memory = progress.next_token(call, active, now)
    cache = run_step(call.params, now.cache, token[:, None], active[:, None])
    passes = dataclasses.replace(cache.shared, passes=cache.shared.passes + active.astype(jnp.int32))
    now = dataclasses.replace(now, cache=dataclasses.replace(cache, shared=passes), bad_step=bad, memory=memory)
    return progress.written(call, now, token[:, None], active, jnp.zeros_like(now.num_tokens), seen)


def _depth(call: Call, now: Decoded) -> Array:
    """Choose how many tokens to draft in the next round, for all rows that draft: an int32 scalar."""
    method, limits = cast("Verified", now.cache.method), call.limits
    if method.worth is None:
        return jnp.int32(method.depth)
    rate = rate_of(cast("Passes", now.cache.shared), progress.active_rows(limits, now))
    kept = rate ** jnp.arange(1, method.depth + 1, dtype=jnp.float32)
    depth = jnp.maximum(jnp.sum(kept >= method.worth, dtype=jnp.int32), 1)
    return jnp.minimum(depth, progress.largest(limits, now, progress.left_tokens(limits, now)) - 1)


def _round(call: Call, now: Decoded) -> Decoded:
    """Run a round: the draft decodes tokens, Full reads them, and the tokens that it agrees with are kept."""
    limits, cache, most = call.limits, now.cache, now.cache.method.drafts
    active = progress.active_rows(limits, now)
    first, bad, before, memory = progress.next_token(call, active, now)
    # A row's drafted tokens fit its limit, so they also fit its storage.
    wanted = jnp.minimum(_depth(call, now), progress.left_tokens(limits, now) - 1)
    wanted = jnp.where(active & ~progress.ends(first, call.eos), wanted, 0)
    place = now.num_tokens[:, None] + jnp.arange(most + 1, dtype=jnp.int32)[None]
    with jax.named_scope("draft"):  # profiles tell the parts of a round by these names
        tokens, cache = _drafted(call, cache, first, wanted, place, memory)
    order = jnp.arange(most + 1, dtype=jnp.int32)[None]
    with jax.named_scope("judge"):
        logits, cache, inputs = _judged(call.params, cache, tokens, active[:, None] & (order <= wanted[:, None]))
    accepted, behind, memory = progress.agreed(call, logits[:, :-1], tokens, place[:, 1:], order, wanted, memory)
    broken = ~jnp.isfinite(logits).all(axis=-1) & (order < accepted[:, None])
    worse = (bad < 0) & broken.any(axis=1)
    bad = jnp.where(worse, now.num_tokens + 1 + jnp.argmax(broken, axis=1).astype(jnp.int32), bad)
    with jax.named_scope("commit"):
        cache = _committed(cache, inputs, logits, wanted, accepted, active)
    passes = noted(cache.shared, wanted, accepted, active)
    now = dataclasses.replace(now, cache=dataclasses.replace(cache, shared=passes), bad_step=bad, memory=memory)
    return progress.written(call, now, tokens, active, accepted, before, behind)


def _drafted(
    call: Call, cache: Cache, first: Array, wanted: Array, place: Array, memory: Memory | None
) -> tuple[Array, Cache]:
    """Decode ``wanted`` int32 [B] tokens with the draft, behind the token ``first`` int32 [B] of each row.

    Returns:
        The tokens int32 [B, 1 + N], the first one included, and the cache as it was, perhaps with other arrays.
    """
    method, most, pad = cast("Verified", cache.method), cache.method.drafts, padding_token(cache.model)
    tokens = jnp.full(place.shape, pad, jnp.int32).at[:, 0].set(first)

    def step(order: Array, carry: tuple[Array, Cache, Memory | None]) -> tuple[Array, Cache, Memory | None]:
        tokens, view, memory = carry
        fed, asked = (lax.dynamic_slice_in_dim(x, at, 1, 1) for x, at in ((tokens, order), (place, order + 1)))
        drafts = (order < wanted)[:, None]
        view = run_step(call.params, view, fed, drafts, sync_host=False)
        drawn, _, state = progress.draw(call.sampler, view.logits[:, None], call.draws, asked, memory)
        guess = jnp.where(drafts, drawn, pad)
        memory = None if memory is None else memory.add(guess[:, 0], drafts[:, 0], state)
        return lax.dynamic_update_slice_in_dim(tokens, guess, order + 1, 1), view, memory

    # A number of steps that is known before the program runs spares the host a wait for each.
    count = most if method.worth is None else axes.most(jnp.max(wanted), axes.DATA)
    tokens, view, _ = lax.fori_loop(0, count, step, (tokens, method.view(cache), memory))
    methods, runs = cast("tuple[VerifiedLayer, ...]", layer_methods(method, cache.model)), method_layers(cache.model)
    layers = tuple(
        methods[layer].recover(before, after, wanted, most) if layer in runs else before
        for layer, (before, after) in enumerate(zip(cache.layers, view.layers, strict=True))
    )
    return tokens, dataclasses.replace(cache, layers=layers)


def _judged(params: Any, cache: Cache, tokens: Array, active: Array) -> tuple[Array, Cache, list[tuple]]:
    """Run the model on ``tokens`` int32 [B, T] as Full does, without telling the draft.

    Args:
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
        if is_recurrent(cache.model, layer):  # tokens cannot be taken out of the state, so it stays as it was
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
        options = position_option(cache.model, position)
        logits, results = cache.model.apply(params, tokens, attend, cache.layers, **options)
    layers = tuple(state for state, _, _ in results)
    return logits, dataclasses.replace(cache, layers=layers), [each[1:] for each in results]


def _committed(cache: Cache, made: list[tuple], logits: Array, wanted: Array, accepted: Array, active: Array) -> Cache:
    """Keep the first token and the ``accepted`` int32 [B] tokens behind it of a pass in each row that is ``active``."""
    order = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    kept = active[:, None] & (order <= accepted[:, None])
    rejected = wanted - accepted
    layers: list[Any] = []
    methods, runs = layer_methods(cache.method, cache.model), method_layers(cache.model)
    with soft_cap(attention_soft_cap(cache.model)):
        for layer, (method, state, (inputs, mass)) in enumerate(zip(methods, cache.layers, made, strict=True)):
            if is_recurrent(cache.model, layer):
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
