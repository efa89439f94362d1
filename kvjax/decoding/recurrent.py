"""Layers without keys: instead of a cache that grows they keep a few arrays of a fixed size, which every token changes.

A model says in its member ``recurrent`` (`kvjax.protocol.typing.Model`) which layers are recurrent, and the shapes of
what they keep of a row. Its `apply` calls ``attend(layer, state, advance)`` there, with a function of its own:

    ``advance(arrays, real) -> (out, arrays)``

``arrays`` are the layer's arrays with axis B first, zeros before the first token. ``real`` is bool [B, T], False on padding,
which comes last in a row; padding must change no array. ``out`` is whatever the model makes of its tokens.

Such a layer runs `Recurrent`, whatever the method: the method applies only to layers with attention. The arrays are a part of
the cache like any other state, so they are forked, saved and spread over devices with it. Tokens cannot be taken out of them
again, so `kvjax.Verified` advances them a second time, by kept tokens only.
"""

import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache import LayerSpec
from kvjax.protocol.method import Cost, Inputs, LayerMethod
from kvjax.protocol.typing import EMPTY, Recurrence, pytree, static

Advance = Callable[[tuple[Array, ...], Array], tuple[Any, tuple[Array, ...]]]


@pytree
class Memory:
    """What a recurrent layer keeps."""

    arrays: tuple[Array, ...]  # the model's, each with axis B first


@pytree
class Recurrent(LayerMethod):
    """The state of a recurrent layer; see the module docstring."""

    keeps_of_row: Recurrence = static("shape and dtype of each array, without axis B")

    keeps = "the model's state"
    evicts = True
    slot_block = 0  # every device has the whole of its heads' state
    lacks = ()  # there is no softmax, and the state keeps the dtypes of the model

    def init(self, spec: LayerSpec) -> Memory:
        return Memory(arrays=tuple(jnp.zeros((spec.batch, *shape), dtype) for shape, dtype in self.keeps_of_row))

    def attend(self, state: Memory, inputs: Inputs) -> tuple[Array, Memory]:
        raise ValueError("a recurrent layer has no keys to attend to: expected a call of `advance`")

    def chosen(self, state: Memory, inputs: Inputs) -> Array:
        return jnp.full((*inputs.key.shape[:2], 1), EMPTY, jnp.int32)

    def cost(self, state: Memory, shared: Any) -> Cost:
        rows = len(state.arrays[0])
        none = jnp.zeros((rows,), jnp.float32)
        return Cost(attended=none, kv_bytes=none + row_bytes(self.keeps_of_row), metadata_bytes=none, counters={})

    def room(self, state: Memory) -> None:
        return None


def row_bytes(shapes: Recurrence) -> int:
    """Count the bytes that a recurrent layer keeps of a row."""
    return sum(math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in shapes)


def run_recurrent(state: Memory, given: tuple[Any, ...], position: Array) -> tuple[Any, Memory]:
    """Run a recurrent layer on the tokens at ``position`` int32 [B, T].

    Args:
        given: what the model passed to ``attend`` after the state: its function ``advance``.
        position: EMPTY for padding.

    Raises:
        ValueError: the model gave no function, or its function returned arrays of other shapes or dtypes.
    """
    if len(given) != 1 or not callable(given[0]):
        raise ValueError(f"a recurrent layer must call attend(layer, state, advance), got {len(given)} values after state")
    out, arrays = cast("Advance", given[0])(state.arrays, position >= 0)
    got, expected = (jax.tree.map(lambda x: (x.shape, x.dtype), tuple(x)) for x in (arrays, state.arrays))
    if got != expected:
        raise ValueError(f"`advance` of a recurrent layer must return arrays like its own, {expected}, got {got}")
    return out, Memory(arrays=tuple(arrays))
