"""Axis letters, the pytree decorator and the seam to a model.

Axis letters used in every docstring of this library:

====== ============================== ====== ==============================
letter meaning                        letter meaning
====== ============================== ====== ==============================
B      batch rows                     S      cache slots
L      layers                         P      pages
H      KV heads                       C      slots per page
G      query heads per KV head        K      selected slots
T      query tokens                   D      head_dim
V      vocabulary                     W      observation window
====== ============================== ====== ==============================

Query ``[B, H, G, T, D]``, key and value ``[B, H, T, D]``, cache ``[B, H, S, D]``. A *slot* is an index into the
cache, a *position* is the token's absolute place in its row (what RoPE sees); compaction moves slots, never positions.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, Protocol

import jax

EMPTY = -1  # position of a slot that holds nothing: not yet written, evicted, or padding


def static(default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field that decides a shape, a Python branch or a kernel: part of the jit key, never traced."""
    return dataclasses.field(default=default, metadata={"static": True})


def pytree[T](cls: type[T]) -> type[T]:
    """Frozen, keyword-only dataclass registered as a pytree; fields made with `static` are metadata."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    return jax.tree_util.register_dataclass(cls)


def is_concrete(value: Any) -> bool:
    """Whether ``value`` is a plain Python number, so that it may be checked (tracers and arrays pass unchecked).

    Dataclass validation also runs when JAX rebuilds a pytree, with tracers and placeholders as leaves.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def positive_int(name: str, value: Any) -> int:
    """A whole number of at least 1, as a Python number."""
    try:
        found = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = 0
    if found < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return found


class Model(Protocol):
    """What kvjax needs of a model: a hashable description that can run itself.

    It is static: it keys the jit cache and travels in the cache's tree definition. ``models.ModelConfig`` is one.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rope_scaling: Any
    eos_token_ids: tuple[int, ...]
    dtype: str

    def apply(self, params: Any, tokens: jax.Array, attend: Callable, states: tuple, *, last: jax.Array | None = None):
        """Run all layers on ``tokens`` int32 [B, T].

        ``attend(layer, state, q, k, v) -> (out, state)`` receives un-rotated q [B, H, G, T, D] and k, v [B, H, T, D].
        ``last`` int32 [B] picks the one position per row that reaches the LM head.

        Returns:
            logits float32 [B, V] (or [B, T, V] with ``last=None``) and the new states.
        """
        ...
