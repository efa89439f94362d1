"""The traced core behind a prompt: it runs a model over tokens with a method's storage; `kvjax.reading` reads the prompt."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import Cache
from kvjax.layers import guessing_layers, layer_methods, observe
from kvjax.method import run_hook, settle_due
from kvjax.offload import decode_synced, sync
from kvjax.passes import layer_inputs
from kvjax.sampling import Sampler
from kvjax.typing import EMPTY, pytree
from pallas_kernels import axes


def smallest(limits: list[int | None], default: int) -> int:
    """The smallest of ``default`` and the given limits; None means no limit."""
    return min([default, *(limit for limit in limits if limit is not None)])


def run_step(
    params: Any, cache: Cache, tokens: Array, active: Array, sync_host: bool = True, length: Array | None = None
) -> Cache:
    """Store ``tokens`` int32 [B, T] and attend with them.

    Args:
        params: model parameters.
        cache: has room for the tokens.
        tokens: int32 [B, T].
        active: bool [B, T], False on padding, which comes last in a row.
        sync_host: False if the caller writes the token to host memory (`kvjax.offload.sync`).
        length: int32 [B], tokens of each row after the call that these belong to, if more follow in it; see `kvjax.rope`.
    """
    methods = layer_methods(cache.method, cache.model)
    at = cache.length[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    position = jnp.where(active, at, EMPTY)
    count = jnp.sum(active, axis=1, dtype=jnp.int32)
    length = cache.length + count if length is None else length

    def attend(layer: int, state: Any, q: Array, k: Array, v: Array, guess: Array | None = None) -> tuple[Array, Any]:
        inputs = layer_inputs(cache.model, methods[layer], q, k, v, position, tokens, cache.shared, None, length, guess)
        return run_hook("attend", methods[layer], state, inputs)

    asked = guessing_layers(methods) if tokens.shape[1] == 1 else ()
    options = {"guess": asked} if asked else {}  # a model need not know of guesses
    logits, states = cache.model.apply(
        params, tokens, attend, cache.layers, last=jnp.maximum(count - 1, 0), **options
    )
    states = settle_due(methods, states)
    if sync_host and tokens.shape[1] == 1:
        states = sync(states, 1)
    return observe(
        dataclasses.replace(
            cache,
            layers=states,
            length=cache.length + count,
            logits=jnp.where((count > 0)[:, None], logits, cache.logits),
        ),
        decoding=tokens.shape[1] == 1,
    )


def run_extend(params: Any, cache: Cache, tokens: Array, length: Array) -> Cache:
    """Append right-padded tokens int32 [B, T], of which ``length`` int32 [B] are real, in pieces that the method can take."""
    methods = layer_methods(cache.method, cache.model)
    total = tokens.shape[1]
    # A single token would look like a decode step, in which a method selects. But a question reads all kept tokens, however
    # long it is, so a single token gets a padding token beside it.
    chunk = smallest([m.max_tokens(in_prompt=False) for m in methods], max(total, 2))
    chunks = -(-total // chunk)
    tokens = jnp.pad(tokens, ((0, 0), (0, chunks * chunk - total)))
    active = jnp.arange(chunks * chunk)[None] < length[:, None]
    after = cache.length + length
    if chunks == 1:
        return run_step(params, cache, tokens, active)

    def body(index: Array, cache: Cache) -> Cache:
        piece, real = (lax.dynamic_slice_in_dim(x, index * chunk, chunk, 1) for x in (tokens, active))
        return run_step(params, cache, piece, real, length=after)

    # Questions are padded to lengths that many share: the pieces behind the longest hold padding only.
    return lax.fori_loop(0, -(-axes.most(jnp.max(length), axes.DATA) // chunk), body, cache)


@pytree
class Decoded:
    """The state of a decoding loop, and its result."""

    cache: Cache
    tokens: Array  # int32 [B, N], 0 after a row's end
    num_tokens: Array  # int32 [B], generated tokens, a closing EOS included
    done: Array  # bool [B], the row met an EOS or its limit
    bad_step: Array  # int32 [B], first step whose logits were not finite, -1 if none
    key: Array | None


def all_done(now: Decoded) -> Array:
    """Whether all rows, on all devices, have ended: a bool scalar."""
    return axes.every(now.done.all())


def start_decode(cache: Cache, key: Array | None, done: Array, steps: int) -> Decoded:
    """The state before the first of ``steps`` tokens. Rows in ``done`` bool [B] never change."""
    return Decoded(
        cache=cache,
        tokens=jnp.zeros((cache.batch, steps), jnp.int32),
        num_tokens=jnp.zeros((cache.batch,), jnp.int32),
        done=done,
        bad_step=jnp.full((cache.batch,), -1, jnp.int32),
        key=key,
    )


def decode_once(params: Any, now: Decoded, step: Array, sampler: Sampler, eos: Array) -> Decoded:
    """Draw token number ``step`` of every row that is not done, and store it. The caller syncs host memory."""
    draw_key, key = (None, None) if now.key is None else jax.random.split(now.key)
    active = ~now.done
    token = jnp.where(active, sampler.draw(now.cache.logits, draw_key), 0)
    broken = active & (now.bad_step < 0) & ~jnp.isfinite(now.cache.logits).all(axis=-1)
    return Decoded(
        cache=run_step(params, now.cache, token[:, None], active[:, None], sync_host=False),
        tokens=lax.dynamic_update_slice_in_dim(now.tokens, token[:, None], step, 1),
        num_tokens=now.num_tokens + active.astype(jnp.int32),
        done=now.done | (token[:, None] == eos[None]).any(axis=1),
        bad_step=jnp.where(broken, step, now.bad_step),
        key=key,
    )


def run_decode(
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
    """Draw up to ``steps`` tokens per row. Every drawn token is stored in the cache, EOS included.

    A token of ``eos`` int32 [E] ends its row, which then does not change. So does the last of a row's ``limits`` int32 [B];
    None means that all rows have ``steps``. ``stop_early`` leaves the loop when all rows have ended.
    """
    start = start_decode(cache, key, done if limits is None else done | (limits < 1), steps)

    def body(step: Array, now: Decoded) -> Decoded:
        made = decode_once(params, now, step, sampler, eos)
        return made if limits is None else dataclasses.replace(made, done=made.done | (made.num_tokens >= limits))

    def run(first: Array | int, stop: Array | int, now: Decoded) -> Decoded:
        """Steps ``first`` to ``stop``; fewer if all rows are done before and ``stop_early`` is set."""
        if not stop_early:
            return lax.fori_loop(first, stop, body, now)
        _, end = lax.while_loop(
            lambda carry: (carry[0] < stop) & ~all_done(carry[1]),
            lambda carry: (carry[0] + 1, body(*carry)),
            (jnp.int32(first), now),
        )
        return end

    return decode_synced(
        run,
        start,
        steps,
        layers=lambda now: now.cache.layers,
        replace=lambda now, layers: dataclasses.replace(now, cache=dataclasses.replace(now.cache, layers=layers)),
        done=all_done if stop_early else None,
    )
