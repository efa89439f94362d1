"""The inputs of a layer in a pass of the model, and the second pass over a prompt, for methods that reread it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.decoding.recurrent import run_recurrent
from kvjax.decoding.shared_storage import Common, stores_only
from kvjax.protocol.method import Inputs, LayerMethod, Method, Reading
from kvjax.protocol.typing import EMPTY, Model, is_recurrent, layer_ropes, layered, method_layers, not_none, position_option
from kvjax.rope import frequencies, prepare
from pallas_kernels.dispatch import run_shared


def layer_inputs(
    model: Model,
    layer: int,
    method: LayerMethod,
    q: Array,
    k: Array,
    v: Array,
    position: Array,
    tokens: Array,
    shared: Any,
    start: Array | int | None,
    length: Array,
    guess: Array | None = None,
    sinks: Array | None = None,
) -> Inputs:
    """Build the inputs of a layer's attention. RoPE frequencies may depend on ``length`` int32 [B], tokens of each row.

    Raises:
        ValueError: the model called ``attend`` with a query, a key or a value of another shape than its description says.
    """
    (rows, count), heads, dim = tokens.shape, model.num_kv_heads, model.head_dim
    keys = (rows, heads, count, dim)
    expected = ((rows, heads, model.num_q_heads // heads, count, dim), keys, keys)
    if (got := tuple(array.shape for array in (q, k, v))) != expected:
        raise ValueError(
            f"{type(model).__name__}.apply must call attend with q [B, H, G, T, D], k and v [B, H, T, D] of the shapes "
            f"{', '.join(map(str, expected))}, got {', '.join(map(str, got))}"
        )
    rope = layer_ropes(model)[layer]
    inv_freq = jnp.asarray(frequencies(rope, model.head_dim))
    known = None if method.extrapolates else length
    if guess is not None:
        guess, _ = prepare(guess, k, position, known, rope)
    q, k = prepare(q, k, position, known, rope)
    return Inputs(
        query=q, key=k, value=v, position=position, tokens=tokens, inv_freq=inv_freq, shared=shared, start=start,
        guess=guess, sinks=sinks,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Pass:
    """Some tokens of the prompts of some rows, which the model runs on, or one layer of it."""

    each: tuple[tuple[LayerMethod, ...], ...]  # [method][layer]
    shared: tuple  # the state that all layers share, of each method
    length: Array  # int32 [R], tokens of each row
    tokens: Array  # int32 [R, T]
    start: Array | int  # position of the first
    position: Array  # int32 [R, T], EMPTY for padding

    @classmethod
    def at(cls, start: Array | int, tokens: Array, length: Array, each: tuple, shared: tuple) -> Pass:
        """Make the pass over tokens int32 [R, T] from position ``start`` on."""
        at = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        return cls(each, shared, length, tokens, start, jnp.where(at < length[:, None], at, EMPTY))

    def attend(
        self, model: Model, layer: int, states: tuple, given: tuple, sinks: Array | None, common: Common
    ) -> tuple[Array, tuple]:
        """Run a layer's attention under every method, with what the model gave; return an output, and the states [method]."""
        if is_recurrent(model, layer):  # the same under every method
            out, state = run_recurrent(states[0], given, self.position)
            return out, (state,) * len(states)
        (q, k, v), holders = given, common.holders[layer]
        outs, made = [], []
        for at, (layers, state, own) in enumerate(zip(self.each, states, self.shared, strict=True)):
            if holders[at] == at or not stores_only(state):
                method, place = layers[layer], (self.position, self.tokens, own, self.start, self.length)
                inputs = layer_inputs(model, layer, method, q, k, v, *place, None, sinks)
                out, state = run_shared(type(method).attend, method, state, inputs)
                outs.append(out)
            made.append(state)
        return outs[0], common.restore_layer(layer, tuple(made))


def checked(model: Model, rows: int, layers: int, made: tuple[Array, tuple[Any, ...]]) -> tuple[Array, tuple[Any, ...]]:
    """Check what `Model.apply` returned for one token's logits per row: logits [B, V], and a state for each layer.

    Raises:
        ValueError: logits of another shape, or another number of states.
    """
    logits, states = made
    expected = (rows, model.vocab_size)
    if logits.shape != expected or len(states) != layers:
        raise ValueError(
            f"{type(model).__name__}.apply must return logits of shape {expected}, of the token `last` in each row, and "
            f"{layers} states, got {logits.shape} and {len(states)} states"
        )
    return logits, tuple(states)


def last_logits(params: Any, hidden: Array, length: Array, *, model: Model) -> Array:
    """Compute the logits behind the last tokens, float32 [R, V], from hidden states [R, S, E]."""
    last = jnp.maximum(length - 1, 0)[:, None, None]
    logits = not_none("model", layered(model)).head(params, jnp.take_along_axis(hidden, last, axis=1)[:, 0])
    return jnp.where((length > 0)[:, None], logits, 0)


def row_of[Tree](tree: Tree, row: Array) -> Tree:
    """Slice row ``row``, an int32 scalar, out of every leaf [B, ...]: [1, ...]."""
    return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, 1), tree)


def put_rows[Tree](tree: Tree, new: Tree, rows: Array) -> Tree:
    """Write ``new`` [R, ...] into the ``rows`` int32 [R] of every leaf [B, ...]; in place, one row after the other."""

    def put(at: Array | int, tree: Tree) -> Tree:
        def one(x: Array, y: Array) -> Array:
            return lax.dynamic_update_slice_in_dim(x, lax.dynamic_slice_in_dim(y, at, 1), rows[at], 0)

        return jax.tree.map(one, tree, new)

    return put(0, tree) if len(rows) == 1 else lax.fori_loop(0, len(rows), put, tree)


def reread(
    params: Any,
    tokens: Array,
    length: Array,
    method: Method,
    layers: Sequence[LayerMethod],
    states: tuple[Any, ...],
    shared: Any,
    model: Model,
    logits: Array,
    known: dict[Hashable, Any],
) -> tuple[Any, ...]:
    """Run `Method.reread` on the states of the layers that run the method, if there are any; return the states of all layers.

    Args:
        tokens: int32 [B, S], the prompt, padded on the right.
        length: int32 [B], tokens of the prompt in each row.
        states: the states of all layers, which have the whole prompt and are not finished.
        logits: float32 [B, V], of the token after the prompt.
        known: what the methods of a prefill have found in common; see `Reading.once`.
    """
    seen = method_layers(model)

    def apply(
        given: tuple[Any, ...], piece: Array, count: Array, attend: Callable, nudges: Sequence[Array] | None = None
    ) -> tuple[tuple[Any, ...], Array]:
        piece = jnp.pad(piece, ((0, 0), (0, max(2 - piece.shape[1], 0))))  # a single token would be a decode step
        at = jnp.arange(piece.shape[1], dtype=jnp.int32)[None]
        position = jnp.where(at < count[:, None], length[:, None] + at, EMPTY)

        def one(layer: int, state: Any, *given: Any, sinks: Array | None = None, written: Any = None) -> tuple[Array, Any]:
            if is_recurrent(model, layer):
                return run_recurrent(state, given, position)[0], state
            q, k, v = given
            # The frequencies are the same as for the prompt's keys.
            inputs = layer_inputs(model, layer, layers[layer], q, k, v, position, piece, shared, None, length, None, sinks)
            if layer in seen:
                return attend(state, inputs if written is None else dataclasses.replace(inputs, written=written))
            return run_shared(type(layers[layer]).attend, layers[layer], state, inputs)[0], state

        states = _put(given)
        options: dict[str, Any] = position_option(model, position)
        if nudges is not None:
            none = jnp.zeros((), model.dtype)
            options["nudges"] = tuple(nudges[seen.index(at)] if at in seen else none for at in range(len(states)))
        made = model.apply(params, piece, one, states, last=jnp.maximum(count - 1, 0), **options)
        after, new = made if nudges is not None else checked(model, len(piece), len(states), made)
        return _among(seen, new), after

    def _put(given: tuple[Any, ...]) -> tuple[Any, ...]:
        """Put the states ``given`` by the method into the states of all layers."""
        every = dict(enumerate(states)) | dict(zip(seen, given, strict=True))
        return tuple(every[layer] for layer in range(len(states)))

    if not seen:
        return states
    ends = tuple(model.eos_token_ids)
    reading = Reading(tokens=tokens, length=length, logits=logits, eos_token_ids=ends, apply=apply, known=known)
    return _put(method.reread(_among(seen, states), reading))


def _among(seen: Sequence[int], states: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(states[layer] for layer in seen)
