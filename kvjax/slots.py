"""Methods with exact attention over slots of a `LayerCache`: `SlotMethod`, and `BoundedSlots` for bounded storage.

Both store keys rotated at their true position, and share one `attend` (`SlotAttention`). They differ in how the prompt is
read: a `SlotMethod` attends to it densely and compresses at its end, `BoundedSlots` evicts while it is read.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention import Selection, attend_all, attend_held, attend_selected
from kvjax.cache import LayerCache, LayerSpec, LayerStorage, empty_cache
from kvjax.method import Cost, Inputs, LayerMethod, Prompt, Step, free_slots
from kvjax.offload import Near, empty_storage, offload
from kvjax.rope import rotate
from kvjax.selection import top_slots
from kvjax.typing import EMPTY, is_concrete, pytree, static
from pallas_kernels.causal_attention import causal_attention
from pallas_kernels.column_mass import column_mass
from pallas_kernels.prefix_attention import prefix_attention


@pytree
class SlotState:
    """State of a slot method: exact storage, the method's metadata, and the prompt's record until it is finished."""

    cache: LayerStorage
    aux: Any = None
    prompt: Prompt | None = None


class SlotAttention(LayerMethod):
    """What all slot methods share: storing tokens, attention, accounting; see `SlotMethod` and `BoundedSlots`.

    A decode step appends its token, attends over the slots that `select` returns, and `update` maintains metadata or evicts.
    Several tokens at once after the prompt (`extend`) attend densely to everything that is kept.
    """

    implementation: str | None = None  # of attention over selected slots; a field of the methods that select

    # What the class needs or does. Wrappers answer with properties, so these are no dataclass fields.
    obs_window = 0  # last prompt queries that `compress` is given
    observes_prompt = False  # True: `compress` is given the attention mass of the prompt
    observes_steps = False  # True: `update` is given the attention probabilities of its tokens
    reads_tokens = False  # True: `compress` is given the prompt's token ids
    moves_slots = False  # True: `update` moves slots, so no index from outside may point to them

    @abc.abstractmethod
    def select(self, cache: LayerStorage, aux: Any, step: Step) -> Selection | None:
        """Slots for one decode step (T = 1); None for all. The new token is stored already."""

    @abc.abstractmethod
    def update(self, cache: Any, aux: Any, step: Step, mass: Array | None) -> tuple[Any, Any]:
        """After attention over the tokens just stored: maintain metadata, evict. Returns the cache and the metadata."""

    @abc.abstractmethod
    def count(self, cache: LayerStorage, aux: Any, shared: Any) -> tuple[Array, Array]:
        """Slots a decode step attends to (see `Cost`), int32 [B, H], and bytes of metadata it reads, float32 [B, H]."""

    def counters(self, aux: Any, shared: Any) -> dict[str, Array]:
        """Statistics of the run so far, float32 [B] each; see `Cost`. None by default."""
        return {}

    def bounded_slots(self) -> int | None:
        """Slots of storage that never grows, scratch included; None, the default, if storage grows with the tokens."""
        return None

    def max_tokens(self, in_prompt: bool) -> int | None:
        """Most tokens that one `attend` call may take; None, the default, if any number."""
        return None

    def attend(self, state: SlotState, inputs: Inputs) -> tuple[Array, SlotState]:
        in_prompt = state.prompt is not None
        start = inputs.start if in_prompt else None
        step_like = not in_prompt and inputs.query.shape[3] == 1
        if step_like:
            query, cache = state.cache.append_rotated(
                inputs.query, inputs.key, inputs.value, inputs.position, inputs.inv_freq
            )
            key = value = None
        else:
            query, key, value = _rotated(inputs)
            cache = state.cache.append(key, value, inputs.position, start)
        step = Step(query=query, position=inputs.position, tokens=inputs.tokens, shared=inputs.shared)
        lse = None
        if step_like:
            chosen = self.select(cache, state.aux, step)
            out, lse = (
                attend_held(query[..., 0, :], cache)
                if chosen is None
                else attend_selected(query[..., 0, :], cache, chosen, self.implementation)
            )
            out, lse = out[..., None, :], lse[..., None]
        elif state.prompt is not None and isinstance(start, int) and not self.observes_prompt:
            # No earlier chunk to look back on: a fused kernel where there is one.
            out = causal_attention(query, key, value)
        elif state.prompt is not None:
            read = cache.resident()
            out, lse = prefix_attention(
                query,
                read.key,
                read.value,
                start=start,
                length=jnp.sum(inputs.position >= 0, axis=1, dtype=jnp.int32),
                scale=1 / math.sqrt(query.shape[-1]),
            )
        else:
            out, lse = attend_all(query, cache, inputs.position)
        mass = None
        if self.observes_prompt if in_prompt else self.observes_steps:
            mass = column_mass(
                query,
                cache.resident().key,
                lse,
                query_position=inputs.position,
                key_position=cache.position,
                scale=1 / math.sqrt(query.shape[-1]),
                limit=None if start is None else start + query.shape[3],  # no query of this chunk sees slots behind it
            )
        out = out.reshape(inputs.query.shape)
        if state.prompt is not None:
            return out, SlotState(cache=cache, prompt=_observe(state.prompt, query, inputs, mass))
        # Metadata is read before it is written. Without this barrier XLA keeps a copy of what an in-place kernel will change.
        out, aux = lax.optimization_barrier((out, state.aux))
        # Several tokens may need keys that have no copies on the device.
        seen = cache if step_like else cache.resident()
        changed, aux = self.update(seen, aux, step, mass)
        return out, SlotState(cache=changed if seen is cache else cache, aux=aux)

    def chosen(self, state: SlotState, inputs: Inputs) -> Array:
        query, key, value = _rotated(inputs)
        cache = state.cache.append(key, value, inputs.position)
        step = Step(query=query, position=inputs.position, tokens=inputs.tokens, shared=inputs.shared)
        chosen = self.select(cache, state.aux, step)
        if chosen is None:
            return cache.position
        slots, mask = chosen.tokens(cache)
        return jnp.where(mask, jnp.take_along_axis(cache.position, slots, axis=2), EMPTY)

    def cost(self, state: SlotState, shared: Any) -> Cost:
        cache = state.cache
        slots, metadata = self.count(cache, state.aux, shared)
        row = 2 * cache.key.shape[-1] * cache.key.dtype.itemsize  # one key and one value
        attended = slots.astype(jnp.float32)
        crossing = jnp.zeros_like(attended)
        if cache.rows is not None:
            crossing = jnp.maximum(attended - cache.copied().astype(jnp.float32)[:, None], 0)
        return Cost(
            attended=attended.mean(axis=1),
            kv_bytes=attended.sum(axis=1) * row,
            metadata_bytes=metadata.sum(axis=1),
            bus_bytes=crossing.sum(axis=1) * row,
            counters=self.counters(state.aux, shared),
        )

    def room(self, state: SlotState) -> Array | None:
        return free_slots(state.cache, self.bounded_slots())


@pytree
class SlotMethod(SlotAttention):
    """Exact attention over chosen slots: write ``compress``, ``select``, ``update`` and ``count``.

    Prompt chunks attend densely and exactly; at the prompt's end `compress` may discard slots.
    """

    composable = True
    near = Near()  # which slots of an offloaded cache have copies on the device

    @abc.abstractmethod
    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Any]:
        """At the prompt's end: the cache to keep, with ``room`` free slots if anything is discarded, and metadata."""

    def init(self, spec: LayerSpec) -> SlotState:
        slots = spec.prompt_slots + (0 if self.evicts else spec.max_new_tokens)
        window = (spec.batch, spec.num_kv_heads, spec.group_size, self.obs_window, spec.head_dim)
        record = Prompt(
            query=jnp.zeros(window, spec.dtype),
            query_position=jnp.full((spec.batch, self.obs_window), EMPTY, jnp.int32),
            mass=jnp.zeros((spec.batch, spec.num_kv_heads, slots if self.observes_prompt else 0), jnp.float32),
            tokens=jnp.zeros((spec.batch, slots if self.reads_tokens else 0), jnp.int32),
        )
        return SlotState(cache=empty_storage(spec, slots), prompt=record)

    def finish(self, state: SlotState, spec: LayerSpec) -> SlotState:
        if state.prompt is None:
            return state
        whole = state.cache.resident()
        cache, aux = self.compress(whole, state.prompt, spec.max_new_tokens)
        rows = state.cache.rows
        if rows is None:
            return SlotState(cache=cache, aux=aux)
        # Back to where the rows came from, unless they are still there.
        return SlotState(cache=offload(cache, self.near, host=rows.host if cache is whole else None), aux=aux)


@pytree
class BoundedSlots(SlotAttention):
    """Never holds more than ``budget`` tokens per KV head and a block on its way in: write ``score``.

    The prompt is read in blocks: a block is appended, attends to everything stored, and the cache is cut back to the budget.
    A decode step does the same with a block of one token.
    """

    budget: int | Array = 1024  # tokens kept per KV head, traced, at most `capacity`
    capacity: int | None = static(None)  # allocated for them; None = budget
    block: int = static(128)  # prompt tokens processed between evictions

    keeps = "`budget` tokens per KV head"
    evicts = True
    moves_slots = True

    @abc.abstractmethod
    def score(self, cache: LayerCache) -> Array:
        """Value of each stored token: float32 [B, H, S]; the lowest are evicted."""

    def init(self, spec: LayerSpec) -> SlotState:
        slots = min(self.bounded_slots(), spec.prompt_slots + spec.max_new_tokens)
        return SlotState(cache=empty_cache(spec.batch, spec.num_kv_heads, slots, spec.head_dim, spec.dtype))

    def finish(self, state: SlotState, spec: LayerSpec) -> SlotState:
        return state

    def select(self, cache: LayerStorage, aux: None, step: Step) -> None:
        return None

    def update(self, cache: LayerCache, aux: None, step: Step, mass: Array | None) -> tuple[LayerCache, None]:
        score = self.score(cache)
        if step.position.shape[1] == 1:
            return cache.evict(score, budget=self.budget)[0], None
        slots, keep = top_slots(score, cache.valid, self.budget, self.capacity)
        return cache.compact(slots, keep, cache.num_slots - slots.shape[2]), None

    def count(self, cache: LayerStorage, aux: None, shared: Any) -> tuple[Array, Array]:
        return count_all(cache)

    def bounded_slots(self) -> int:
        return self.capacity + self.block

    def max_tokens(self, in_prompt: bool) -> int:
        return self.block


def count_all(cache: LayerStorage) -> tuple[Array, Array]:
    """`SlotMethod.count` of a method that attends to every stored slot and reads no metadata."""
    stored = jnp.sum(cache.valid, axis=2, dtype=jnp.int32)
    return stored, jnp.zeros(stored.shape, jnp.float32)


def check_budget(method: Any, least: int, needs: str) -> None:
    """Fill ``capacity`` from a concrete budget, and refuse a budget below ``least`` slots; ``needs`` says why so many."""
    budget, capacity = method.budget, method.capacity
    name = type(method).__name__
    if is_concrete(budget):
        if budget != int(budget) or budget < least:
            raise ValueError(
                f"{name}: budget must be a whole number of at least {least} tokens ({needs}), got {budget}"
            )
        if capacity is None:
            object.__setattr__(method, "capacity", int(budget))
        elif budget > capacity:
            raise ValueError(f"{name}: budget must be at most capacity={capacity}, got {budget}")
    elif capacity is None:
        raise ValueError(f"{name}: capacity (static) must be given when budget is an array or traced")


def _rotated(inputs: Inputs) -> tuple[Array, Array, Array]:
    """Rotated query and key, and the value."""
    query = rotate(inputs.query, inputs.position[:, None, None], inputs.inv_freq)
    return query, rotate(inputs.key, inputs.position[:, None], inputs.inv_freq), inputs.value


def _observe(prompt: Prompt, query: Array, inputs: Inputs, mass: Array | None) -> Prompt:
    """Keep the last W real queries of each row, whatever chunk they came in, and token ids; add up attention mass."""
    window, position = prompt.query.shape[3], inputs.position
    if prompt.tokens.shape[1]:
        tokens = lax.dynamic_update_slice_in_dim(prompt.tokens, inputs.tokens, inputs.start, 1)
        prompt = dataclasses.replace(prompt, tokens=tokens)
    if window:
        queries = jnp.concatenate([prompt.query, query], axis=3)
        positions = jnp.concatenate([prompt.query_position, position], axis=1)
        # Real tokens precede padding, so the window ends at the chunk's last real token.
        first = jnp.sum(position >= 0, axis=1)[:, None] + jnp.arange(window)[None]
        prompt = dataclasses.replace(
            prompt,
            query=jnp.take_along_axis(queries, first[:, None, None, :, None], axis=3),
            query_position=jnp.take_along_axis(positions, first, axis=1),
        )
    if mass is not None:
        prompt = dataclasses.replace(prompt, mass=prompt.mass + mass)
    return prompt
