"""The bytes of keys and values that a decode step reads over the bus, counted from a real selection where possible."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.api.measure import measure
from kvjax.cache import Cache
from kvjax.cache.offload import OffloadedLayerCache
from kvjax.decoding.layers import layer_methods
from kvjax.protocol.method import Inputs
from kvjax.protocol.typing import layer_ropes
from kvjax.rope import frequencies
from pallas_kernels.host import has_copy, on_host


def traffic(cache: Cache) -> dict[str, Any]:
    """Count what a step reads, from the selection of the last offloaded layer for a random query.

    A method's accounting says only how much crosses the bus at least, as if every copy was attended. If host memory has
    arrays of the method's own (ShadowKV), it is exact, and the bytes come from it.

    Args:
        cache: a cache after decoding.

    Returns:
        "bus_bytes", bytes over the bus for all layers and rows; "layers", how many layers have rows in host memory; and
        "hot", the share of the rows attended in these layers that are read on the device.
    """
    methods = layer_methods(cache.method, cache.model)
    hosted = [at for at, state in enumerate(cache.layers) if any(map(on_host, jax.tree.leaves(state)))]
    if not hosted:
        return {"bus_bytes": 0.0, "hot": 1.0, "layers": 0}
    state = cache.layers[hosted[-1]]
    stores = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, OffloadedLayerCache))
    layer = next((x for x in stores if isinstance(x, OffloadedLayerCache)), None)
    if layer is None:
        stats, value = measure(cache), next(x for x in jax.tree.leaves(state) if on_host(x))
        bus_bytes = float(stats.bus_bytes.sum())
        rows = bus_bytes / (value.shape[3] * value.dtype.itemsize)
        attended = float(stats.attended.sum()) * value.shape[1] * len(hosted)
        return {"bus_bytes": bus_bytes, "hot": 1 - rows / attended, "layers": len(hosted)}
    inputs = next_inputs(cache, hosted[-1], layer.value.dtype)
    chosen = np.asarray(jax.jit(methods[hosted[-1]].chosen)(state, inputs))
    slot = jnp.arange(layer.num_slots, dtype=jnp.int32)[None]
    copied = np.asarray(has_copy(slot, layer.cursor[:, None] + 1, layer.sinks, layer.value.shape[2]))
    position = np.asarray(layer.position)
    attended = cold = 0
    for b, h in np.ndindex(chosen.shape[:2]):
        listed = chosen[b, h][chosen[b, h] >= 0]
        there = position[b, h][copied[b] & (position[b, h] >= 0)]
        attended += len(listed)
        cold += len(listed) - np.isin(listed, [*there, int(cache.length[b])]).sum()
    row = layer.host.shape[3] * layer.host.dtype.itemsize
    return {"bus_bytes": float(cold * row * len(hosted)), "hot": float(1 - cold / attended), "layers": len(hosted)}


def next_inputs(cache: Cache, at: int, dtype: Any) -> Inputs:
    """Draw random inputs of the next token for the layer ``at``."""
    model = cache.model
    heads = (cache.batch, model.num_kv_heads)
    query, key, value = (
        jax.random.normal(part, (*heads, *groups, 1, model.head_dim), dtype)
        for part, groups in zip(jax.random.split(jax.random.key(0), 3), ((model.group_size,), (), ()), strict=True)
    )
    return Inputs(
        query=query,
        key=key,
        value=value,
        position=cache.length[:, None],
        tokens=jnp.ones((cache.batch, 1), jnp.int32),  # token 1 ends no sentence
        inv_freq=jnp.asarray(frequencies(layer_ropes(model)[at], model.head_dim)),
        shared=cache.shared,
    )
