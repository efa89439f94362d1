"""The time of a step's attention alone: over a selection that is made once, without storing, selecting and updating."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.speed.device_time import loop_seconds
from experiments.speed.traffic import next_inputs
from experiments.speed.variants import structure
from kvjax.attention.over_cache import attend_held, attend_selected
from kvjax.cache import Cache, LayerCache
from kvjax.decoding.layers import layer_methods
from kvjax.methods.tokenselect import TokenSelect, TokenState
from kvjax.protocol.method import Step
from kvjax.protocol.slots import SlotMethod, SlotState
from pallas_kernels.attend.gather_attention import gather_attention


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
    at, inputs = cache.length[:, None], next_inputs(cache, cache.model.num_layers - 1, cache.model.dtype, seed)
    token = jax.jit(lambda m, state, inputs: m.chosen(state, inputs))(method, state, inputs)[:, :1]
    mask = (token >= 0) & (token < at[:, None])  # the newest token is not stored yet
    return _attend_tokens, inputs.query[..., 0, :], state.cache, token, mask, inputs.inv_freq


def _attend_tokens(query: Array, store: LayerCache, token: Array, mask: Array, inv_freq: Array) -> Any:
    place = jnp.broadcast_to(jnp.arange(token.shape[2], dtype=jnp.int32), token.shape)
    scale = 1 / math.sqrt(query.shape[-1])
    return gather_attention(query, *store.stored, token, mask, scale=scale, place=place, inv_freq=inv_freq)
