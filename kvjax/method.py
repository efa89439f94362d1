"""The method protocol: what a KV-cache method must answer, at two levels.

A method is a frozen pytree of hyper-parameters with pure functions; a field made with `static` decides a shape, a branch
or a kernel, every other field is a traced leaf that `jax.vmap` can sweep. The protocol has three classes:

* `Method`: what the whole model sees: which `LayerMethod` runs in which layer, and state shared by all layers.
* `LayerMethod`: storage and attention of one layer. Write one of these when a method has storage or logits of its own.
* `SlotMethod`: exact attention over a subset of the slots of a `LayerCache`; asks for the three hooks ``compress``,
  ``select`` and ``update``. `kvjax.families` shrinks most methods to one function.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention import Selection, attend_all, attend_held, attend_selected
from kvjax.cache import Cache, LayerCache, empty_layer
from kvjax.rope import rotate
from kvjax.typing import EMPTY, pytree
from pallas_kernels.causal_attention import causal_attention
from pallas_kernels.column_mass import column_mass
from pallas_kernels.prefix_attention import prefix_attention


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Static sizes a layer's storage is built from."""

    layer: int
    batch: int
    num_kv_heads: int
    group_size: int  # query heads per KV head
    head_dim: int
    dtype: str
    prompt_slots: int  # padded prompt length in tokens
    max_new_tokens: int  # tokens that may follow the prompt


@pytree
class Inputs:
    """What one call of a layer's attention is given; fields nobody reads cost nothing under jit."""

    query: Array  # [B, H, G, T, D], before RoPE
    key: Array  # [B, H, T, D], before RoPE
    value: Array  # [B, H, T, D]
    position: Array  # int32 [B, T]; EMPTY marks padding, only behind real tokens
    tokens: Array  # int32 [B, T], token ids
    inv_freq: Array  # float32 [D/2], RoPE angle per position
    shared: Any  # the method's shared state
    start: Array | int | None = None  # first position of a prompt chunk; the int 0: the whole prompt; None: after it


@pytree
class Prompt:
    """What was observed of the prompt, for a method that compresses at its end; unused parts have size zero."""

    query: Array  # [B, H, G, W, D], the last W rotated queries of each row, oldest first
    query_position: Array  # int32 [B, W], EMPTY where the prompt is shorter than W
    mass: Array  # float32 [B, H, S], attention probability each slot received, summed over queries and group
    tokens: Array  # int32 [B, S], token id of each slot


@pytree
class Step:
    """Tokens that a decode step (T = 1) or an `extend` has just stored."""

    query: Array  # [B, H, G, T, D], rotated
    position: Array  # int32 [B, T], EMPTY for padding and for rows that stand still, which must change nothing
    tokens: Array  # int32 [B, T], token ids
    shared: Any  # the method's shared state


@pytree
class Cost:
    """What decoding one more token takes in one layer, per row; a slot that is about to be evicted does not count."""

    attended: Array  # float32 [B], tokens entering the softmax, mean over KV heads
    bytes_read: Array  # float32 [B], bytes of K, V and metadata read, all KV heads
    counters: dict[str, Array]  # statistics of the run so far that the method keeps, float32 [B] each


class Method(abc.ABC):
    """What the whole model sees of a method. Subclasses are abstract or final; nothing implemented is overridden."""

    extrapolates = False  # True: positions are re-numbered, so prompts may exceed the model's position limit
    keeps = "every token"  # in words, for tables
    evicts = False  # True: tokens are given up for good, and storage physically shrinks
    composable = False  # True: a `SlotMethod`, which wrappers can compose
    spans_layers = False  # True: keeps state across layers, so it cannot be the method of some layers only
    needs_tokenizer = False  # True: needs to know what token ids mean; made with a tokenizer by `kvjax.make`
    offload = False  # share of the layers with rows in pinned host memory, the last ones; a field of the methods that can

    @abc.abstractmethod
    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        """The method that runs in ``layer``."""

    @abc.abstractmethod
    def init_shared(self, specs: tuple[LayerSpec, ...]) -> Any:
        """State that all layers read, from the sizes of every layer; every leaf has axis B first. None if there is none."""

    @abc.abstractmethod
    def observe(self, cache: Cache, decoding: bool) -> Cache:
        """Called after a decode step, or after the prompt or an `extend`; all layers and the new logits are in place."""


class LayerMethod(Method):
    """Storage and attention of one layer; its `offload` is that of this layer, True or False (`layer_method`)."""

    @abc.abstractmethod
    def init(self, spec: LayerSpec) -> Any:
        """Empty state, ready for the first prompt chunk; every leaf has axis B first."""

    @abc.abstractmethod
    def attend(self, state: Any, inputs: Inputs) -> tuple[Array, Any]:
        """Store the tokens and attend: returns the output [B, H, G, T, D] and the new state."""

    @abc.abstractmethod
    def finish(self, state: Any, spec: LayerSpec) -> Any:
        """Turn the state after the last prompt chunk into the state decoding keeps."""

    @abc.abstractmethod
    def chosen(self, state: Any, inputs: Inputs) -> Array:
        """Positions that the decode step ``inputs`` (T = 1) attends to: int32 [B, H, K], EMPTY where there is no entry."""

    @abc.abstractmethod
    def cost(self, state: Any, shared: Any) -> Cost:
        """Accounting of the next decode step at this state."""

    @abc.abstractmethod
    def room(self, state: Any) -> Array | None:
        """Tokens that still fit, int32 [B]; None if storage is bounded and never fills."""

    @abc.abstractmethod
    def max_tokens(self, in_prompt: bool) -> int | None:
        """Most tokens one `attend` call may take; None if any number."""

    def init_shared(self, specs: tuple[LayerSpec, ...]) -> None:
        return None

    def observe(self, cache: Cache, decoding: bool) -> Cache:
        return cache


def layer_method(method: Method, layer: int, num_layers: int) -> LayerMethod:
    """What ``method.for_layer`` answers, knowing whether this layer's rows are among the share that goes to host memory."""
    found = method.for_layer(layer, num_layers)
    if isinstance(found.offload, bool):
        return found
    return dataclasses.replace(found, offload=layer >= num_layers - round(found.offload * num_layers))


def check_offload(method: Method) -> None:
    """Refuse an ``offload`` that is no share of the layers."""
    share = method.offload
    if not isinstance(share, (bool, int, float)) or not 0 <= share <= 1:
        raise ValueError(
            f"{type(method).__name__}: offload must be True, False or a share of the layers from 0 to 1, got {share!r}"
        )


@pytree
class SlotState:
    """State of a `SlotMethod`: exact storage, the method's metadata, and the prompt's record until it is finished."""

    cache: LayerCache
    aux: Any = None
    prompt: Prompt | None = None


@pytree
class SlotMethod(LayerMethod):
    """Exact attention over chosen slots, keys stored rotated at their true position.

    Prompt chunks attend densely and exactly; at the prompt's end `compress` may discard slots. A decode step appends its
    token, attends over `select`'s slots, and `update` maintains metadata or evicts. Several tokens at once after the
    prompt (`extend`) attend densely to everything kept.
    """

    composable = True
    implementation = None  # of attention over selected slots; a field of the methods that select
    near = (0, 64)  # of an offloaded cache: first slots, and newest tokens, of which the device has copies

    # What the class needs or does; wrappers answer with properties, so these are not dataclass fields.
    obs_window = 0  # last prompt queries `compress` is given
    observes_attention = False  # `compress` and `update` are given attention probabilities
    reads_tokens = False  # `compress` is given the prompt's token ids
    moves_slots = False  # `update` moves slots, so nothing may index them from outside
    dense_prompt = True  # False: storage is bounded from the prompt's first token on

    @abc.abstractmethod
    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, Any]:
        """At the prompt's end: the cache to keep, with ``room`` free slots if anything is discarded, and metadata."""

    @abc.abstractmethod
    def select(self, cache: LayerCache, aux: Any, step: Step) -> Selection | None:
        """Slots for one decode step (T = 1); None for all. The new token is stored already."""

    @abc.abstractmethod
    def update(self, cache: LayerCache, aux: Any, step: Step, mass: Array | None) -> tuple[LayerCache, Any]:
        """After attention over the tokens just stored: maintain metadata, evict."""

    @abc.abstractmethod
    def count(self, cache: LayerCache, aux: Any, shared: Any) -> tuple[Array, Array]:
        """Slots a decode step attends to (see `Cost`), int32 [B, H], and bytes of metadata it reads, float32 [B, H]."""

    @abc.abstractmethod
    def counters(self, aux: Any, shared: Any) -> dict[str, Array]:
        """Statistics of the run so far, float32 [B] each; see `Cost`."""

    @abc.abstractmethod
    def bounded_slots(self) -> int | None:
        """Slots of storage that never grows, scratch included; None if storage grows with the tokens."""

    def init(self, spec: LayerSpec) -> SlotState:
        if not self.dense_prompt:
            return SlotState(cache=_empty(spec, min(self.bounded_slots(), spec.prompt_slots + spec.max_new_tokens)))
        slots = spec.prompt_slots + (0 if self.evicts else spec.max_new_tokens)
        window = (spec.batch, spec.num_kv_heads, spec.group_size, self.obs_window, spec.head_dim)
        record = Prompt(
            query=jnp.zeros(window, spec.dtype),
            query_position=jnp.full((spec.batch, self.obs_window), EMPTY, jnp.int32),
            mass=jnp.zeros((spec.batch, spec.num_kv_heads, slots if self.observes_attention else 0), jnp.float32),
            tokens=jnp.zeros((spec.batch, slots if self.reads_tokens else 0), jnp.int32),
        )
        return SlotState(cache=_empty(spec, slots, self.offload), prompt=record)

    def attend(self, state: SlotState, inputs: Inputs) -> tuple[Array, SlotState]:
        in_prompt = state.prompt is not None
        start = inputs.start if in_prompt else None
        if not in_prompt and inputs.query.shape[3] == 1:
            query, cache = state.cache.append_rotated(
                inputs.query, inputs.key, inputs.value, inputs.position, inputs.inv_freq
            )
        else:
            query, key, value = self._rotated(state, inputs)
            cache = state.cache.append(key, value, inputs.position, start)
        step = Step(query=query, position=inputs.position, tokens=inputs.tokens, shared=inputs.shared)
        limit = None if start is None else start + query.shape[3]  # slots behind a prompt chunk need no visit
        if not in_prompt and query.shape[3] == 1:
            chosen = self.select(cache, state.aux, step)
            out, lse = (
                attend_held(query[..., 0, :], cache)
                if chosen is None
                else attend_selected(query[..., 0, :], cache, chosen, self.implementation)
            )
            out, lse = out[..., None, :], lse[..., None]
        elif in_prompt and isinstance(start, int) and not self.observes_attention:
            # No earlier chunk to look back on: a fused kernel where there is one.
            out = causal_attention(query, key, value)
        elif in_prompt:
            read = cache.staged()
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
        if self.observes_attention:
            mass = column_mass(
                query,
                cache.staged().key,
                lse,
                query_position=inputs.position,
                key_position=cache.position,
                scale=1 / math.sqrt(query.shape[-1]),
                limit=limit,
            )
        out = out.reshape(inputs.query.shape)
        if in_prompt:
            return out, SlotState(cache=cache, prompt=_observe(state.prompt, query, inputs, mass))
        # Metadata is read before it is written; without being told, XLA keeps a copy of what an in-place kernel will change.
        out, aux = lax.optimization_barrier((out, state.aux))
        if query.shape[3] > 1 and cache.host is not None:  # several tokens may need more than the copies have
            _, aux = self.update(cache.staged(), aux, step, mass)
        else:
            cache, aux = self.update(cache, aux, step, mass)
        return out, SlotState(cache=cache, aux=aux)

    def finish(self, state: SlotState, spec: LayerSpec) -> SlotState:
        if state.prompt is None:
            return state
        whole = state.cache.staged()
        cache, aux = self.compress(whole, state.prompt, spec.max_new_tokens)
        if self.offload:  # back to where it came from, unless it is still there
            cache = cache.offload(*self.near, host=state.cache.host if cache is whole else None)
        return SlotState(cache=cache, aux=aux)

    def chosen(self, state: SlotState, inputs: Inputs) -> Array:
        query, key, value = self._rotated(state, inputs)
        cache = state.cache.append(key, value, inputs.position)
        step = Step(query=query, position=inputs.position, tokens=inputs.tokens, shared=inputs.shared)
        chosen = self.select(cache, state.aux, step)
        if chosen is None:
            return cache.position
        slots, mask = chosen.tokens(cache)
        return jnp.where(mask, jnp.take_along_axis(cache.position, slots, axis=2), EMPTY)

    def cost(self, state: SlotState, shared: Any) -> Cost:
        slots, metadata = self.count(state.cache, state.aux, shared)
        row = 2 * state.cache.key.shape[-1] * state.cache.key.dtype.itemsize  # one key and one value
        bytes_read = slots.astype(jnp.float32) * row + metadata
        return Cost(
            attended=slots.astype(jnp.float32).mean(axis=1),
            bytes_read=bytes_read.sum(axis=1),
            counters=self.counters(state.aux, shared),
        )

    def room(self, state: SlotState) -> Array | None:
        return free_slots(state.cache, self.bounded_slots())

    def _rotated(self, state: SlotState, inputs: Inputs) -> tuple[Array, Array, Array]:
        """Rotated query and key, and value, with the heads of the storage: `compress` may have made one per query head."""
        query = rotate(inputs.query, inputs.position[:, None, None], inputs.inv_freq)
        key = rotate(inputs.key, inputs.position[:, None], inputs.inv_freq)
        batch, heads, group = query.shape[:3]
        copies = state.cache.key.shape[1] // heads
        if copies == 1:
            return query, key, inputs.value
        query = query.reshape(batch, heads * copies, group // copies, *query.shape[3:])
        return query, jnp.repeat(key, copies, axis=1), jnp.repeat(inputs.value, copies, axis=1)


def _empty(spec: LayerSpec, slots: int, offload: bool = False) -> LayerCache:
    return empty_layer(spec.batch, spec.num_kv_heads, slots, spec.head_dim, spec.dtype, hosted=2 if offload else 0)


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


def free_slots(cache: LayerCache, bounded: int | None) -> Array | None:
    """`LayerMethod.room` of a cache: None if it has all the slots its method ever needs, else what is free.

    A budget beyond the prompt and the tokens announced for it is not allocated, so such a cache can fill.
    """
    return None if bounded is not None and cache.num_slots >= bounded else cache.num_slots - cache.cursor


def num_bytes(tree: Any) -> int:
    """Bytes allocated by all arrays of ``tree``."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
