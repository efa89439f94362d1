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
cache. A *position* is the number of a token in its row, which RoPE reads. Compaction changes slots, never positions.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, dataclass_transform

import jax

if TYPE_CHECKING:
    from typing_extensions import TypeIs

EMPTY = -1  # position of a slot that holds nothing: not yet written, evicted, or padding


def static(default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field that decides a shape, a Python branch or a kernel: part of the jit key, never traced.

    Write ``static(default=...)`` with the keyword: type checkers look for it.
    """
    return dataclasses.field(default=default, metadata={"static": True})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static,))
def pytree[T](cls: type[T]) -> type[T]:
    """Make a class a frozen, keyword-only dataclass and a pytree. Fields made with `static` are part of its structure."""
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    return jax.tree_util.register_dataclass(made)


def is_concrete(value: Any) -> TypeIs[int | float]:
    """Whether ``value`` is a plain Python number, which can be checked; tracers and arrays are not checked.

    A dataclass checks its fields also when JAX rebuilds a pytree. Its leaves are then tracers or placeholders.
    """
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def not_none[T](name: str, value: T | None) -> T:
    """Return ``value``, which must have been set by now; a type checker then knows that it is not None.

    Raises:
        ValueError: it is None; the message calls it ``name``.
    """
    if value is None:
        raise ValueError(f"{name} must be set before it is used, got None")
    return value


def positive_int(name: str, value: Any) -> int:
    """Return ``value`` as a Python integer, if it is a whole number of at least 1.

    Raises:
        ValueError: ``value`` is anything else; the message calls it ``name``.
    """
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return number


class Model(Protocol):
    """What kvjax needs of a model: a hashable description that can run itself.

    The description is static: it is part of the jit key and of a cache's tree structure. ``models.ModelConfig`` is such a
    description. All members are read-only, so a frozen dataclass can have them as fields.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def num_q_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def rope_scaling(self) -> Any: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The sliding window of each layer in tokens, None for a layer that attends in full; () if no layer has one.

        A model without this member has no windows.
        """
        ...

    @property
    def dtype(self) -> str: ...

    def apply(
        self, params: Any, tokens: jax.Array, attend: Callable, states: tuple, *, last: jax.Array | None = None
    ) -> tuple[jax.Array, tuple]:
        """Run all layers on ``tokens`` int32 [B, T].

        Each layer calls ``attend(layer, state, q, k, v) -> (out, state)`` with un-rotated q [B, H, G, T, D] and k, v
        [B, H, T, D]. ``last`` int32 [B] says which token's hidden state goes to the LM head, per row.

        Returns:
            logits float32 [B, V] (or [B, T, V] with ``last=None``) and the new states.
        """
        ...

    def weight_bytes(self, params: Any, rows: int) -> int:
        """Bytes of ``params`` that a decode step of ``rows`` rows reads."""
        ...
