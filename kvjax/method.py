"""The method protocol: what a KV-cache method must answer for the whole model and for one layer.

A method is a frozen pytree of hyper-parameters with pure functions. A field made with `static` decides a shape, a branch or a
kernel; every other field is a traced leaf that `jax.vmap` can sweep. The protocol has these classes:

* `Method`: what the whole model sees: which `LayerMethod` runs in which layer, and state shared by all layers.
* `LayerMethod`: storage and attention of one layer. Write one of these when a method has storage or logits of its own.
* `kvjax.slots.SlotMethod`: exact attention over a subset of the slots of a `LayerCache`. It asks for four hooks:
  ``compress``, ``select``, ``update`` and ``count``. `kvjax.families` shrinks most methods to one or two functions.
* `kvjax.slots.BoundedSlots`: the same for methods whose storage is bounded from the prompt's first token on.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax import Array

from kvjax.cache import Cache, LayerStorage
from kvjax.cache import LayerSpec as LayerSpec
from kvjax.typing import pytree


@pytree
class Inputs:
    """What one call of a layer's attention is given. Fields that a method does not read cost nothing under jit."""

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
    """What was observed of the prompt, for a method that compresses at its end. Unused parts have size zero."""

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
    """What decoding one more token takes in one layer, per row. A slot that is about to be evicted does not count."""

    attended: Array  # float32 [B], tokens that enter the softmax, mean over KV heads
    kv_bytes: Array  # float32 [B], bytes of keys and values read, all KV heads
    metadata_bytes: Array  # float32 [B], bytes of the method's own metadata read, all KV heads
    bus_bytes: Array | float = 0.0  # float32 [B], bytes of `kv_bytes` that cross the bus, at least
    counters: Mapping[str, Array]  # statistics of the run so far that the method keeps, float32 [B] each

    @property
    def bytes_read(self) -> Array:
        """Bytes of keys, values and metadata read, all KV heads: float32 [B]."""
        return self.kv_bytes + self.metadata_bytes


class Method(abc.ABC):
    """What the whole model sees of a method. Subclasses are abstract or final; nothing implemented is overridden."""

    extrapolates = False  # True: positions are re-numbered, so prompts may exceed the model's position limit
    keeps = "every token"  # in words, for tables
    evicts = False  # True: tokens are given up for good, and storage physically shrinks
    composable = False  # True: a `SlotMethod`, which wrappers can compose
    spans_layers = False  # True: keeps state across layers, so it cannot be the method of some layers only
    needs_tokenizer = False  # True: needs to know what token ids mean; made with a tokenizer by `kvjax.make`
    offloadable = False  # True: works on an offloaded cache; such a method has a field `offload`
    offload: bool | float = False  # share of the layers, the last ones, whose rows are in pinned host memory; True is all

    @abc.abstractmethod
    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        """The method that runs in ``layer``."""

    @classmethod
    def tokenizer_knobs(cls, tokenizer: Any, vocab_size: int) -> dict[str, Any]:
        """Knobs that a method which `needs_tokenizer` takes from a tokenizer; ``vocab_size`` is the model's."""
        return {}

    @abc.abstractmethod
    def init_shared(self, specs: tuple[LayerSpec, ...]) -> Any:
        """State that all layers read, from the sizes of every layer; every leaf has axis B first. None if there is none."""

    @abc.abstractmethod
    def observe(self, cache: Cache, decoding: bool) -> Cache:
        """Called after a decode step, or after the prompt or an `extend`; all layers and the new logits are in place."""


class LayerMethod(Method):
    """Storage and attention of one layer."""

    @abc.abstractmethod
    def init(self, spec: LayerSpec) -> Any:
        """Empty state, ready for the first prompt chunk; every leaf has axis B first."""

    @abc.abstractmethod
    def attend(self, state: Any, inputs: Inputs) -> tuple[Array, Any]:
        """Store the tokens and attend: returns the output [B, H, G, T, D] and the new state."""

    @abc.abstractmethod
    def finish(self, state: Any, spec: LayerSpec) -> Any:
        """Turn the state after the last prompt chunk into the state that decoding keeps."""

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
        """Most tokens that one `attend` call may take; None if any number."""

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        """The method itself; a method whose layers differ answers something else."""
        return self

    def init_shared(self, specs: tuple[LayerSpec, ...]) -> Any:
        return None

    def observe(self, cache: Cache, decoding: bool) -> Cache:
        return cache


def free_slots(cache: LayerStorage, bounded: int | None) -> Array | None:
    """`LayerMethod.room` of a cache: None if it has all the slots its method ever needs, else the number of free ones.

    A budget beyond the prompt and the tokens announced for it is not allocated, so such a cache can fill.
    """
    return None if bounded is not None and cache.num_slots >= bounded else cache.num_slots - cache.cursor


def num_bytes(tree: Any) -> int:
    """Bytes allocated by all arrays of ``tree``."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
