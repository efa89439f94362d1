"""What passes over a prompt, and the end of a layer's prompt, take besides states and hidden states: estimates."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.accounting.temporaries import most_bytes
from kvjax.decoding.layer_bytes import each_device
from kvjax.decoding.passes import Pass
from kvjax.decoding.shared_storage import Common
from kvjax.protocol.method import LayerMethod, LayerSpec, num_bytes
from kvjax.protocol.typing import Model, has_sinks, is_recurrent, layered


def finishing(method: LayerMethod, reading: LayerSpec, spec: LayerSpec, mesh: Any) -> int:
    """Estimate what `LayerMethod.finish` takes besides the state before it and the finished state, as `layer_bytes`."""
    leaves, kind = jax.tree.flatten(method)
    shapes = tuple(map(jax.api_util.shaped_abstractify, leaves))
    return _finishing(kind, shapes, reading, spec, None if spec.parts == 1 else mesh)


@functools.lru_cache(maxsize=1024)
def _finishing(kind: Any, leaves: tuple[Any, ...], reading: LayerSpec, spec: LayerSpec, mesh: Any) -> int:
    method = jax.tree.unflatten(kind, leaves)
    state = jax.eval_shape(each_device(mesh, lambda method: method.init(reading)), method)
    return most_bytes(each_device(mesh, lambda method, state: method.finish(state, spec)), method, state, consumed=(1,))


def passing(
    method: LayerMethod,
    spec: LayerSpec,
    at: tuple[int, Model],
    chunk: int,
    start: int | None,
    shared: Any,
    params: Any,
    mesh: Any,
) -> int:
    """Estimate what a pass over a prompt takes in a layer besides the layer's state.

    Args:
        method: of the layer.
        spec: the sizes of its storage; ``batch`` is the rows of a pass.
        at: the layer's index, and the model's description.
        chunk: tokens of each row in a pass.
        start: 0 if the pass has the whole prompt, else None.
        shared: shapes of the method's shared state.
        params: shapes of a device's parameters. Without them, or if the model cannot run one layer alone, only attention
            counts.
        mesh: the devices.
    """
    packed = [jax.tree.flatten(x) for x in (method, shared, params)]
    leaves = tuple(tuple(map(jax.api_util.shaped_abstractify, x)) for x, _ in packed)
    return _passing(tuple(kind for _, kind in packed), leaves, spec, at, chunk, start, mesh)


@functools.lru_cache(maxsize=1024)
def _passing(
    kinds: Any, leaves: Any, spec: LayerSpec, at: tuple[int, Model], chunk: int, start: int | None, mesh: Any
) -> int:
    method, shared, params = (jax.tree.unflatten(kind, own) for kind, own in zip(kinds, leaves, strict=True))
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
            return whole.run_layer(params, layer, *arrays, attend, (state,))
        sinks = jnp.zeros((heads, spec.group_size), jnp.float32) if has_sinks(model) else None
        return attend(layer, (state,), *arrays, sinks=sinks)

    state = jax.eval_shape(each_device(mesh, lambda method: method.init(spec)), method)
    args = method, arrays, state, shared, params, tokens, number
    return num_bytes(arrays) + most_bytes(each_device(mesh, run), *args, consumed=(1, 2))
