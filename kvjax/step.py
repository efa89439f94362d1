"""The traced core behind a prompt: it runs a model over tokens with a method's storage; `kvjax.reading` reads the prompt."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import Cache, LayerSpec
from kvjax.method import LayerMethod, Method, run_hook, settle_due
from kvjax.offload import decode_synced, is_offloaded, sync
from kvjax.parts import check_divisible
from kvjax.passes import layer_inputs
from kvjax.plan import Plan
from kvjax.quantised import check_quantisable
from kvjax.sampling import Sampler
from kvjax.typing import EMPTY, Model, pytree
from kvjax.window import SlidingWindow, layer_windows
from pallas_kernels import axes


def fingerprint(params: Any) -> str:
    """A short text that depends on the names and shapes of parameters."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    text = ";".join(f"{jax.tree_util.keystr(path)}{list(leaf.shape)}" for path, leaf in leaves)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def layer_methods(method: Method, model: Model) -> tuple[LayerMethod, ...]:
    """The method of every layer. A layer in which the model has a window stores this window, whatever the method."""
    return tuple(
        method.for_layer(layer, model.num_layers) if window is None else SlidingWindow(window=window)
        for layer, window in enumerate(layer_windows(model))
    )


def guessing_layers(methods: Sequence[LayerMethod]) -> tuple[int, ...]:
    """The layers whose methods want a guess of their query. Layer 0 has no layer before it."""
    return tuple(layer for layer, method in enumerate(methods) if layer > 0 and method.needs_guess)


def layer_specs(
    methods: Sequence[LayerMethod],
    model: Model,
    batch: int,
    prompt_slots: int,
    max_new_tokens: int,
    parts: int = 1,
    kv_dtype: str | None = None,
) -> tuple[LayerSpec, ...]:
    """The static sizes of every layer's storage, of which each of ``parts`` devices has some slots of each row.

    ``methods`` come from `layer_methods`.
    """
    check_quantisable(methods, kv_dtype)
    if parts > 1:
        for method in methods:
            check_divisible(method)
    return tuple(
        LayerSpec(
            batch=batch,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
            group_size=model.num_q_heads // model.num_kv_heads,
            prompt_slots=prompt_slots,
            max_new_tokens=max_new_tokens,
            offloaded=is_offloaded(method, layer, model.num_layers),
            parts=parts,
            kv_dtype=kv_dtype,
        )
        for layer, method in enumerate(methods)
    )


def init_shared(method: Method, model: Model, specs: Sequence[LayerSpec]) -> Any:
    """`Method.init_shared` of the layers without a window; None if there are none. ``specs`` are those of every layer."""
    seen = tuple(spec for spec, window in zip(specs, layer_windows(model), strict=True) if window is None)
    return method.init_shared(seen) if seen else None


def observe(cache: Cache, decoding: bool) -> Cache:
    """`Method.observe`, which sees the layers without a window only: the others are not the method's."""
    chosen = [layer for layer, window in enumerate(layer_windows(cache.model)) if window is None]
    if not chosen:
        return cache
    seen = cache.method.observe(
        dataclasses.replace(cache, layers=tuple(cache.layers[layer] for layer in chosen)), decoding
    )
    layers = list(cache.layers)
    for layer, state in zip(chosen, seen.layers, strict=True):
        layers[layer] = state
    return dataclasses.replace(seen, layers=tuple(layers))


def blank_cache(
    method: Method, model: Model, weights: str = "", plan: Plan | None = None, kv_dtype: str | None = None
) -> Cache:
    """A cache of one row, one prompt token and room for one: for its structure, which does not depend on these sizes."""
    methods = layer_methods(method, model)
    specs = layer_specs(methods, model, 1, 1, 1, 1 if plan is None else plan.parts, kv_dtype)
    cache = Cache(
        layers=tuple(m.finish(m.init(spec), spec) for m, spec in zip(methods, specs, strict=True)),
        shared=init_shared(method, model, specs),
        method=method,
        length=jnp.zeros((1,), jnp.int32),
        logits=jnp.zeros((1, model.vocab_size), jnp.float32),
        model=model,
        weights=weights,
        plan=plan,
        kv_dtype=kv_dtype,
    )
    return observe(cache, decoding=False)


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
