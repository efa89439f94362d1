"""Decode and extend, traced: the model runs on tokens after a prompt, and each layer's method stores and attends."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import Cache
from kvjax.cache.offload import steps_between_syncs, sync
from kvjax.decoding.history import Memory
from kvjax.decoding.layers import guessing_layers, layer_methods, observe, on_model
from kvjax.decoding.log_probs import LogProbs, Seen, log_probs
from kvjax.decoding.passes import checked, layer_inputs
from kvjax.decoding.recurrent import run_recurrent
from kvjax.decoding.sampling import Sampler, split_keys
from kvjax.decoding.settle import settle_due
from kvjax.protocol.typing import EMPTY, Model, attention_soft_cap, is_recurrent, position_option, pytree
from pallas_kernels import axes
from pallas_kernels.dispatch import run_shared
from pallas_kernels.numerics import bounded_loop
from pallas_kernels.soft_cap import soft_cap


def run_step(
    params: Any, cache: Cache, tokens: Array, active: Array, sync_host: bool = True, length: Array | None = None
) -> Cache:
    """Store ``tokens`` int32 [B, T] and attend with them.

    Args:
        tokens: int32 [B, T].
        active: bool [B, T], False on padding, which comes last in a row.
        sync_host: False if the caller writes the token to host memory (`kvjax.cache.offload.sync`).
        length: int32 [B], tokens of each row after the whole `extend` call, if this is a chunk of it; see `kvjax.rope`.
    """
    methods = layer_methods(cache.method, cache.model)
    at = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    position = jnp.where(active, at, EMPTY)
    count = jnp.sum(active, axis=1, dtype=jnp.int32)
    length = cache.length + count if length is None else length
    source = on_model(cache.method, cache.model).source
    signals: dict[int | None, Any] = {}  # by layer, what it hands to later layers

    def attend(layer: int, state: Any, *projections: Any, sinks: Array | None = None) -> tuple[Array, Any]:
        method, shared = methods[layer], cache.shared
        if is_recurrent(cache.model, layer):
            return run_recurrent(state, projections, position)
        (q, k, v), guess = projections[:3], projections[3] if projections[3:] else None
        inputs = layer_inputs(cache.model, layer, method, q, k, v, position, tokens, shared, None, length, guess, sinks)
        if tokens.shape[1] > 1:  # several tokens attend to all that is stored
            return run_shared(type(method).attend, method, state, inputs)
        inputs = dataclasses.replace(inputs, signal=signals.get(source(layer, cache.model.num_layers)))
        out, state = run_shared(type(method).attend, method, state, inputs)
        signals[layer] = method.signal(state)
        return out, state

    asked = guessing_layers(methods) if tokens.shape[1] == 1 else ()
    options: dict[str, Any] = {"guess": asked} if asked else {}  # a model need not know of guesses
    options |= position_option(cache.model, position)
    last = jnp.maximum(count - 1, 0)
    with soft_cap(attention_soft_cap(cache.model)):
        results = cache.model.apply(params, tokens, attend, cache.layers, last=last, **options)
        logits, states = checked(cache.model, len(tokens), len(cache.layers), results)
        states = settle_due(methods, states)
    if sync_host and tokens.shape[1] == 1:
        states = sync(states, 1)
    return observe(
        dataclasses.replace(
            cache, layers=states, length=cache.length + count, logits=jnp.where((count > 0)[:, None], logits, cache.logits)
        ),
        decoding=tokens.shape[1] == 1,
    )


_PASS = 8192  # the most tokens of a pass of `run_extend`, of all rows together: it bounds the memory of activations


def run_extend(params: Any, cache: Cache, tokens: Array, length: Array) -> Cache:
    """Append right-padded tokens int32 [B, T], ``length`` int32 [B] of them real, in chunks that the method can take."""
    methods = layer_methods(cache.method, cache.model)
    total = tokens.shape[1]
    # A single token would look like a decode step, in which a method selects. But an `extend` attends to all kept tokens,
    # however long it is, so a single token gets a padding token after it.
    limits = [most for m in methods if (most := m.max_tokens(in_prompt=False)) is not None]
    chunk = min([max(total, 2), max(_PASS // len(tokens), 8), *limits])
    chunks = -(-total // chunk)
    tokens = jnp.pad(tokens, ((0, 0), (0, chunks * chunk - total)))
    active = jnp.arange(chunks * chunk)[None] < length[:, None]
    after = cache.length + length
    if chunks == 1:
        return run_step(params, cache, tokens, active)

    def body(index: Array, cache: Cache, operands: tuple) -> Cache:
        params, tokens, active, after = operands
        piece, real = (lax.dynamic_slice_in_dim(x, index * chunk, chunk, 1) for x in (tokens, active))
        return run_step(params, cache, piece, real, length=after)

    # Questions are padded to lengths that many share: chunks after the end of the longest hold padding only.
    count = -(-axes.most(jnp.max(length), axes.DATA) // chunk)
    return bounded_loop(body, chunks, count, cache, (params, tokens, active, after))


@pytree
class Decoded:
    """The state of a decoding loop, and its result."""

    cache: Cache
    tokens: Array  # int32 [B, N], `padding_token` after a row's end
    num_tokens: Array  # int32 [B], generated tokens, a closing EOS included
    done: Array  # bool [B], the row met an EOS or its limit
    bad_step: Array  # int32 [B], first step whose logits were not finite, -1 if none
    key: Array | None
    step: Array  # int32, steps run so far
    log_probs: LogProbs | None = None  # [B, N], of the tokens; None if nobody asked
    memory: Memory | None = None  # what the sampler remembers; None if it does not


@dataclasses.dataclass(frozen=True)
class Call:
    """What all steps of a decoding call share."""

    params: Any  # model parameters
    sampler: Sampler
    eos: Array  # int32 [E], tokens that end a row
    limits: Array | None = None  # int32 [B], most tokens of each row; None if nothing limits them
    draws: Array | None = None  # N keys, one for each place of the result; None unless tokens are drawn out of order
    forced: Array | None = None  # int32 [B, N], tokens that are given; None if they are drawn


def padding_token(model: Model) -> int:
    """Return the token that stands after a row's end: the model's first EOS id, or 0 if the model has none."""
    return (*model.eos_token_ids, 0)[0]


def all_done(now: Decoded) -> Array:
    """Return whether all rows, on all devices, have ended: a bool scalar."""
    return axes.every(now.done.all())


def start_decode(
    cache: Cache,
    key: Array | None,
    done: Array,
    steps: int,
    limits: Array | None = None,
    top: int | None = None,
    memory: Memory | None = None,
) -> Decoded:
    """Return the state before the first of ``steps`` tokens.

    Rows in ``done`` bool [B] never change, and neither do rows whose ``limits`` int32 [B] are below 1. With ``top`` there are
    log-probabilities, and so many of the likeliest tokens.
    """
    return Decoded(
        cache=cache,
        tokens=jnp.full((cache.batch, steps), padding_token(cache.model), jnp.int32),
        num_tokens=jnp.zeros((cache.batch,), jnp.int32),
        done=done if limits is None else done | (limits < 1),
        bad_step=jnp.full((cache.batch,), -1, jnp.int32),
        key=key,
        step=jnp.zeros((), jnp.int32),
        log_probs=None if top is None else LogProbs.empty(cache.batch, steps, top),
        memory=memory,
    )


def broken_rows(now: Decoded, active: Array, filtered: Array) -> Array:
    """Mark ``active`` rows whose logits are the first that are not finite, or leave no token to draw: bool [B]."""
    sound_so_far = active & (now.bad_step < 0)
    broken = sound_so_far & ~jnp.isfinite(now.cache.logits).all(axis=-1)
    if now.memory is None:
        return broken
    return broken | (sound_so_far & ~(jnp.max(filtered, axis=-1) > -jnp.inf))  # or one is NaN


def decode_once(call: Call, now: Decoded) -> Decoded:
    """Draw the next token of every row that is not done, and store it. The caller syncs host memory."""
    draw_key, key = split_keys(now.key)
    active, state = ~now.done, None
    if call.forced is None:
        logits, state = call.sampler.process(now.cache.logits, now.memory)
        drawn, filtered = call.sampler.draw(logits, draw_key)
    else:
        drawn, filtered = lax.dynamic_index_in_dim(call.forced, now.step, 1, keepdims=False), now.cache.logits
    token = jnp.where(active, drawn, padding_token(now.cache.model))
    noted = now.log_probs
    if noted is not None:
        seen = Seen(now.cache.logits[:, None], filtered[:, None])
        noted = noted.written(log_probs(noted, seen, token[:, None], active[:, None], call.sampler.temperature), now.step)
    broken = broken_rows(now, active, filtered)
    num_tokens = now.num_tokens + active.astype(jnp.int32)
    done = now.done | (token[:, None] == call.eos[None]).any(axis=1)
    return Decoded(
        cache=run_step(call.params, now.cache, token[:, None], active[:, None], sync_host=False),
        tokens=lax.dynamic_update_slice_in_dim(now.tokens, token[:, None], now.step, 1),
        num_tokens=num_tokens,
        done=done if call.limits is None else done | (num_tokens >= call.limits),
        bad_step=jnp.where(broken, now.step, now.bad_step),
        key=key,
        step=now.step + 1,
        log_probs=noted,
        memory=None if now.memory is None else now.memory.add(token, active, state),
    )


def forgetful(end: Decoded) -> Decoded:
    """Leave out what a loop counts for its sampler: the next one counts again, from the history."""
    return end if end.memory is None else dataclasses.replace(end, memory=end.memory.uncounted())


def run_decode(
    params: Any,
    cache: Cache,
    sampler: Sampler,
    key: Array | None,
    eos: Array,
    done: Array,
    limits: Array | None = None,
    memory: Memory | None = None,
    *,
    steps: int,
    stop_early: bool,
    top: int | None = None,
    forced: Array | None = None,
    advance: Callable[[Call, Decoded], Decoded] | None = None,
) -> Decoded:
    """Draw up to ``steps`` tokens per row. Every drawn token is stored in the cache, EOS included.

    A token of ``eos`` int32 [E] ends its row, which then does not change. A row also ends after ``limits`` int32 [B] tokens;
    None means ``steps`` tokens for all rows. ``stop_early`` leaves the loop when all rows have ended. With ``top`` there are
    log-probabilities (`start_decode`). Tokens that are ``forced`` int32 [B, N] are not drawn. ``memory`` is of a sampler that
    remembers, and has room for the tokens. A method that drafts tokens has a loop of its own, ``advance``.
    """
    call = Call(params, sampler, eos, limits, forced=forced)
    memory = None if memory is None else sampler.recall(memory, cache.logits.shape[1])
    start = start_decode(cache, key, done, steps, limits, top, memory)
    if advance is not None:
        return forgetful(advance(call, start))
    once = functools.partial(decode_once, call)

    def before(stop: Array | int) -> Callable[[Decoded], Array]:
        """Make the condition of a loop that ends at step ``stop``, or earlier if all rows are done and may stop."""
        return lambda now: (now.step < stop) & ~all_done(now) if stop_early else now.step < stop

    every = steps_between_syncs(cache.layers, steps)
    if every is None and forced is not None and not stop_early:  # a known number of steps has a derivative in reverse mode
        return lax.fori_loop(0, steps, lambda _, now: once(now), start)
    if every is None:
        return forgetful(lax.while_loop(before(steps), once, start))

    def block(now: Decoded) -> Decoded:
        """Run steps up to the next multiple of ``every``, and write their tokens to host memory."""
        end = lax.while_loop(before(jnp.minimum(now.step + every, steps)), once, now)
        return dataclasses.replace(end, cache=dataclasses.replace(end.cache, layers=sync(end.cache.layers, every)))

    return forgetful(lax.while_loop(before(steps), block, start))
