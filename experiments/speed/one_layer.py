"""The attention of a single layer: at lengths at which no whole model fits, and as a part of a decode step."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from experiments.speed.device_time import Seconds, loop_seconds, over, touch
from experiments.speed.filled_cache import one_layer_cache
from experiments.speed.variants import Nothing, structure
from kvjax.attention.over_cache import attend_held, attend_selected
from kvjax.cache import Cache, LayerCache, LayerStorage
from kvjax.decoding.layers import layer_methods
from kvjax.methods.tokenselect import TokenSelect, TokenState
from kvjax.protocol.method import Inputs, LayerMethod, Method, Step, settle_due
from kvjax.protocol.slots import SlotMethod, SlotState
from kvjax.protocol.typing import layer_ropes
from kvjax.rope import frequencies
from models import ModelConfig
from pallas_kernels.attend.gather_attention import gather_attention


@dataclasses.dataclass(frozen=True)
class LayerTime:
    """The time of a layer's `attend`: store, select, attend, update.

    Attributes:
        seconds: the time of a call.
        attended: tokens that enter the softmax, mean over KV heads; None inside a prompt.
        bytes_read: bytes of KV and metadata, by the method's own `cost`; None inside a prompt, where methods state no cost.
    """

    seconds: Seconds
    attended: float | None
    bytes_read: float | None


def layer_seconds(
    method: Method,
    model: ModelConfig,
    *,
    length: int,
    queries: int = 1,
    chain: int = 8,
    iterations: int = 8,
    repeats: int = 5,
    seed: int = 0,
    kv_dtype: str | None = None,
) -> LayerTime:
    """Measure the time of the last layer's attention with ``length`` tokens stored, for a single row.

    Args:
        method: the method of the whole model.
        model: sizes.
        length: tokens stored.
        queries: 1 is a decode step; more are a further chunk of a prompt, ``length`` tokens of which are already stored.
        chain: calls per iteration of the timing loop.
        iterations: iterations of the timing loop.
        repeats: measurements. Decode steps continue from one measurement to the next; a prompt chunk is prefilled again.
        seed: seed of the content.
        kv_dtype: dtype of the stored keys and values.

    Raises:
        ValueError: more ``queries`` than the method prefills at once.
    """
    room = queries if queries > 1 else chain * iterations * (repeats + 1) + 1
    sizes = {"length": length, "max_new_tokens": room, "in_prompt": queries > 1, "seed": seed, "kv_dtype": kv_dtype}
    layer, cache = one_layer_cache(method, model, **sizes)
    most = layer.max_tokens(in_prompt=True)
    if queries > 1 and most is not None and queries > most:
        raise ValueError(f"the method reads at most {most} tokens of a prompt at once, got queries={queries}")
    given = _inputs(model, cache, queries, seed)
    whole, state, compile_seconds = _spans(layer, cache.layers[0], given, chain, iterations, repeats)
    nothing = jnp.zeros((1,), jnp.int32)
    bare, _, _ = _spans(Nothing(), nothing, dataclasses.replace(given, shared=None), chain, iterations, repeats)
    seconds = over(whole, bare, chain * iterations, compile_seconds)
    if queries > 1:
        return LayerTime(seconds, None, None)
    cost = jax.jit(lambda m, state, shared: m.cost(state, shared))(layer, state, cache.shared)
    return LayerTime(seconds, float(cost.attended.mean()), float(cost.bytes_read.sum()))


def _inputs(model: ModelConfig, cache: Cache, queries: int, seed: int) -> Inputs:
    """Draw random inputs of ``queries`` tokens per row that follow the cache's tokens."""
    heads = (cache.batch, model.num_kv_heads)
    keys = jax.random.split(jax.random.key(seed + 1), 3)
    q, k, v = (
        jax.random.normal(key, (*heads, *more, queries, model.head_dim), jnp.float32).astype(model.dtype)
        for key, more in zip(keys, ((model.num_q_heads // model.num_kv_heads,), (), ()), strict=True)
    )
    at = cache.length[:, None] + jnp.arange(queries, dtype=jnp.int32)[None]
    return Inputs(
        query=q,
        key=k,
        value=v,
        position=at,
        tokens=at % model.vocab_size,
        inv_freq=jnp.asarray(frequencies(layer_ropes(model)[-1], model.head_dim)),
        shared=cache.shared,
        start=cache.length[0] if queries > 1 else None,
    )


def _spans(
    method: LayerMethod, state: Any, given: Inputs, chain: int, iterations: int, repeats: int
) -> tuple[list[float], Any, float]:
    """Measure the seconds of each repeat of the loop; return them, the last state, and the seconds to compile."""
    run = jax.jit(functools.partial(_loop, chain=chain, iterations=iterations), donate_argnums=1)
    begun = time.perf_counter()
    program = run.lower(method, state, given).compile()
    state, given = jax.block_until_ready(program(method, state, given))
    compile_seconds = time.perf_counter() - begun
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        state, given = jax.block_until_ready(program(method, state, given))
        times.append(time.perf_counter() - begun)
    return times, state, compile_seconds


def _loop(method: LayerMethod, state: Any, given: Inputs, *, chain: int, iterations: int) -> tuple[Any, Inputs]:
    decoding = given.start is None

    def one(state: Any, given: Inputs) -> tuple[Any, Inputs]:
        out, new = method.attend(state, given)
        query = touch(given.query, out)
        if not decoding:
            return _rewound(new, state), dataclasses.replace(given, query=query)
        (new,) = settle_due((method,), (new,))
        return new, dataclasses.replace(given, query=query, position=given.position + 1, tokens=given.tokens + 1)

    def body(_: Array, carry: tuple[Any, Inputs]) -> tuple[Any, Inputs]:
        for _ in range(chain):
            carry = one(*carry)
        return carry

    return lax.fori_loop(0, iterations, body, (state, given))


def _rewound(new: Any, old: Any) -> Any:
    """Return ``new`` with the cursors of ``old``, so that the next chunk overwrites this chunk."""

    def back(x: Any, before: Any) -> Any:
        return dataclasses.replace(x, cursor=before.cursor) if isinstance(x, LayerStorage) else x

    return jax.tree.map(back, new, old, is_leaf=lambda x: isinstance(x, LayerStorage))


def attend_seconds(cache: Cache, seed: int = 0, **loop: int) -> float | None:
    """Measure the seconds per step that all layers spend on attention over their selections, and on nothing else.

    A layer of every kind is timed with a fixed selection, and counts for all layers of its kind.

    Args:
        cache: ready to decode; it is only read.
        seed: seed of the queries.
        **loop: see `experiments.speed.device_time.loop_seconds`.

    Returns:
        Seconds, or None if the attention of some layer cannot be told apart from its selection (the layer is neither a
        `SlotMethod` nor `TokenSelect`).
    """
    methods = layer_methods(cache.method, cache.model)
    if not all(isinstance(m, (SlotMethod, TokenSelect)) for m in methods):
        return None
    kinds: dict[Any, float] = {}
    total = 0.0
    for method, state in zip(methods, cache.layers, strict=True):
        kind = structure(method)
        if kind not in kinds:
            alone = _slot_attention if isinstance(method, SlotMethod) else _token_attention
            kinds[kind] = loop_seconds(*alone(method, state, cache, seed), **loop).median
        total += kinds[kind]
    return total


def _slot_attention(method: SlotMethod, state: SlotState, cache: Cache, seed: int) -> tuple:
    """Return a function that only attends, and its arguments; the query is the first argument."""
    store = state.cache
    heads = cache.model.num_q_heads // store.key.shape[1]
    shape = (*store.key.shape[:2], heads, store.key.shape[3])
    query = jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(store.key.dtype)
    position = cache.length[:, None] - 1
    step = Step(query=query[..., None, :], position=position, tokens=jnp.zeros_like(position), shared=cache.shared)
    chosen = jax.jit(lambda m, store, aux, step: m.select(store, aux, step))(method, store, state.aux, step)
    if chosen is None:
        return attend_held, query, store
    return attend_selected, query, store, chosen


def _token_attention(method: TokenSelect, state: TokenState, cache: Cache, seed: int) -> tuple:
    """Return the same as `_slot_attention`, for a token list that all heads share; keys are rotated as they are read."""
    given = _inputs(cache.model, cache, 1, seed)
    token = jax.jit(lambda m, state, given: m.chosen(state, given))(method, state, given)[:, :1]
    mask = (token >= 0) & (token < cache.length[:, None, None])  # the newest token is not stored yet
    return _attend_tokens, given.query[..., 0, :], state.cache, token, mask, given.inv_freq


def _attend_tokens(query: Array, store: LayerCache, token: Array, mask: Array, inv_freq: Array) -> Any:
    place = jnp.broadcast_to(jnp.arange(token.shape[2], dtype=jnp.int32), token.shape)
    scale = 1 / math.sqrt(query.shape[-1])
    return gather_attention(query, *store.stored, token, mask, scale=scale, place=place, inv_freq=inv_freq)
