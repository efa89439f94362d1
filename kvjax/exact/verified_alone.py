"""Full alone on the cache of `kvjax.Verified`: it decodes as `kvjax.methods.Full` does, and the draft is told later."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax.numpy as jnp
from jax import Array

from kvjax.cache import Cache
from kvjax.exact.verified import Verified
from kvjax.exact.verified_layer import Exact, Pair, VerifiedLayer, draft_of, full_of
from kvjax.protocol.method import Step
from kvjax.protocol.slots import SlotMethod, SlotState
from kvjax.protocol.typing import EMPTY, method_layers


def can_wait(cache: Cache, tokens: int) -> bool:
    """Tell whether the draft in every layer can be told of so many tokens at once, from what Full has stored of them."""
    return cache.shared.draft is None and all(_waits(method, state, tokens) for _, method, state in _verified(cache))


def _waits(method: VerifiedLayer, state: Any, tokens: int) -> bool:
    draft, storage = cast("SlotMethod", method.draft), full_of(state).cache
    if not (draft.slotted and draft.told_later and storage.rows is None and draft.due(draft_of(state)) is None):
        return False
    most = draft.max_tokens(in_prompt=False)
    whole = storage.parts == 1 and storage.older is None and draft_of(state).cache.older is None
    return method.shares or (whole and (most is None or most >= tokens))


def waking_rounds(cache: Cache) -> int:
    """Count the rounds without drafted tokens with which a rest ends.

    One shows a draft that chooses by the attention of passes over several tokens what Full attends to now, because no step of
    Full alone has shown it. No other draft needs any.
    """
    return int(any(method.shares and cast("SlotMethod", method.draft).observes_several for _, method, _ in _verified(cache)))


def alone(cache: Cache) -> Cache:
    """Return the cache of Full alone, which is a part of ``cache``."""
    layers = list(cache.layers)
    for at, _, state in _verified(cache):
        layers[at] = SlotState(cache=full_of(state).cache)
    return dataclasses.replace(cache, method=Exact(), layers=tuple(layers), shared=None)


def told(before: Cache, after: Cache, count: Array, tokens: int) -> Cache:
    """Put what Full has decoded alone into the cache, and tell the draft of it.

    Args:
        before: the cache from which `alone` came.
        after: Full's cache, with more tokens.
        count: int32 [B], tokens that came.
        tokens: the largest ``count``.
    """
    order = jnp.arange(tokens, dtype=jnp.int32)[None]
    position = jnp.where(order < count[:, None], before.length[:, None] + order, EMPTY)
    layers = list(after.layers)
    for at, method, state in _verified(before):
        layers[at] = _told(method, state, cast("SlotState", after.layers[at]), position)
    return dataclasses.replace(after, method=before.method, layers=tuple(layers), shared=before.shared)


def _told(method: VerifiedLayer, state: Any, full: SlotState, position: Array) -> Any:
    """Tell the draft of one layer of tokens at ``position`` int32 [B, T], the newest that ``full`` has."""
    draft, own, cache = cast("SlotMethod", method.draft), draft_of(state), full.cache
    if isinstance(state, Pair):
        first = cache.cursor - jnp.sum(position >= 0, axis=1, dtype=jnp.int32)
        slot = jnp.clip(first[:, None] + jnp.arange(position.shape[1], dtype=jnp.int32)[None], 0, cache.num_slots - 1)
        cache = own.cache.append(*cache.rows_at(slot), position)
    rows, heads, tokens = *cache.position.shape[:2], position.shape[1]
    nothing = jnp.zeros((rows, heads, 1, tokens, cache.key.shape[3]), cache.key.dtype)  # `told_later`: no query is read
    step = Step(query=nothing, position=position, tokens=jnp.zeros_like(position), shared=None)
    changed, aux = draft.update(cache, own.aux, step, None)
    if isinstance(state, Pair):
        return Pair(full=full, draft=SlotState(cache=changed, aux=aux))
    return SlotState(cache=cache, aux=aux)


def _verified(cache: Cache) -> list[tuple[int, VerifiedLayer, Any]]:
    """List the layers that draft: index, method and state. Layers with a window and recurrent layers draft nothing."""
    method, layers = cast("Verified", cache.method), cache.layers
    chosen = method_layers(cache.model)
    return [(at, cast("VerifiedLayer", method.for_layer(at, len(layers))), layers[at]) for at in chosen]
