"""What passes over a prompt, and its end, take besides states and hidden states: estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.accounting.temporaries import most_bytes, peak_bytes
from kvjax.cache import Cache
from kvjax.decoding.layer_bytes import by_shapes, each_device, finish_program, placed_bytes
from kvjax.decoding.layers import layer_methods, observe
from kvjax.decoding.passes import Pass, reread
from kvjax.decoding.shared_storage import Common
from kvjax.protocol.method import LayerMethod, LayerSpec, Method, num_bytes
from kvjax.protocol.typing import Model, has_sinks, is_recurrent, layered


@by_shapes
def finishing(method: LayerMethod, state: Any, **sizes: Any) -> tuple[int, Any]:
    """Estimate what `LayerMethod.finish` takes besides ``state`` and the finished state; return also the latter's shapes.

    ``sizes`` are those of `finish_program`.
    """
    program, made, _ = finish_program(method, state, **sizes)
    return peak_bytes(program, (method, state), consumed=(1,)), made


@by_shapes
def rereading(
    method: Method, params: Any, states: Any, shared: Any, *, specs: Sequence[LayerSpec], model: Model, padded: int, mesh: Any
) -> tuple[int, Any]:
    """Estimate what `Method.reread` takes besides the states before and after it; return also the shapes of those after it.

    Args:
        method: the method.
        params: shapes of a device's parameters.
        states: shapes of the states of all layers.
        shared: shapes of the method's shared state.
        specs: the sizes of each layer's storage.
        model: the description of a device's part of the model.
        padded: tokens of the padded prompt.
        mesh: the devices.
    """
    rows = specs[0].batch

    def run(method: Method, params: Any, states: Any, shared: Any, tokens: Any, length: Any, logits: Any) -> Any:
        return reread(params, tokens, length, method, layer_methods(method, model), states, shared, model, logits, {})

    numbers = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, padded), (rows,)))
    args = method, params, states, shared, *numbers, jax.ShapeDtypeStruct((rows, model.vocab_size), jnp.float32)
    return most_bytes(each_device(mesh, run), *args), jax.eval_shape(each_device(mesh, run), *args)


@by_shapes
def observing(method: Method, states: Any, shared: Any, *, rows: int, model: Model, mesh: Any) -> tuple[int, int]:
    """Estimate what `Method.observe` takes at the prompt's end besides its result, and count the bytes of the shared state.

    Args:
        method: the method.
        states: shapes of the finished states of all layers.
        shared: shapes of the shared state before it.
        rows: of the batch.
        model: the description of a device's part of the model.
        mesh: the devices.
    """

    def run(method: Method, states: Any, shared: Any, length: Any, logits: Any) -> Any:
        now = Cache(
            layers=states, shared=shared, method=method, length=length, logits=logits, model=model, weights="", kv_dtype=None
        )
        return observe(now, decoding=False).shared

    length, logits = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows, model.vocab_size), jnp.float32)
    args = method, states, shared, length, logits
    return most_bytes(each_device(mesh, run), *args), placed_bytes(jax.eval_shape(each_device(mesh, run), *args))[0]


@by_shapes
def passing(
    method: LayerMethod, state: Any, shared: Any, params: Any, *, spec: LayerSpec, at: tuple[int, Model], chunk: int,
    start: int | None, mesh: Any,
) -> int:  # fmt: skip
    """Estimate what a pass over a prompt takes in a layer besides the layer's state.

    Args:
        method: of the layer.
        state: shapes of the layer's state.
        shared: shapes of the method's shared state.
        params: shapes of a device's parameters. Without them, or if the model cannot run one layer alone, only attention
            counts.
        spec: the sizes of the layer's storage; ``batch`` is the rows of a pass.
        at: the layer's index, and the model's description.
        chunk: tokens of each row in a pass.
        start: 0 if the pass has the whole prompt, else None.
        mesh: the devices.
    """
    (layer, model), rows, heads = at, spec.batch, spec.num_kv_heads
    whole = None if params is None else layered(model)
    if whole is None and is_recurrent(model, layer):
        return 0
    keys = (rows, heads, chunk, spec.head_dim)
    queries = (*keys[:2], spec.group_size, *keys[2:])
    given = (queries, keys, keys) if whole is None else ((rows, chunk, whole.hidden_size),)
    arrays = tuple(jax.ShapeDtypeStruct(shape, spec.dtype) for shape in given)
    number, tokens = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((rows, chunk), jnp.int32)

    def run(method: LayerMethod, arrays: Any, state: Any, shared: Any, params: Any, tokens: Any, number: Any) -> Any:
        length, first = jnp.full((rows,), spec.prompt_slots, jnp.int32), number if start is None else start
        now = Pass.at(first, tokens, length, ((method,) * (layer + 1),), (shared,))

        def attend(layer: int, states: Any, *given: Any, sinks: Any = None) -> Any:
            return now.attend(model, layer, states, given, sinks, Common(((0,),) * (layer + 1)))

        if whole is not None:
            (hidden,) = arrays
            return whole.run_layer(params, layer, hidden, attend, (state,))
        sinks = jnp.zeros((heads, spec.group_size), jnp.float32) if has_sinks(model) else None
        return attend(layer, (state,), *arrays, sinks=sinks)

    args = method, arrays, state, shared, params, tokens, number
    return num_bytes(arrays) + most_bytes(each_device(mesh, run), *args, consumed=(1, 2))
