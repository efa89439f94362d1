"""The bytes of keys and values that a decode step reads over the bus, counted from a real selection where possible."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.api.measure import measure
from kvjax.cache import Cache
from kvjax.cache.offload import OffloadedLayerCache
from kvjax.decoding.layers import layer_methods
from kvjax.protocol.method import Inputs
from kvjax.protocol.typing import layer_ropes
from kvjax.rope import frequencies
from pallas_kernels.host import has_copy, on_host


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The keys and values that a decode step reads.

    Attributes:
        bus_bytes: bytes over the bus, for all layers and rows.
        hot: share of the attended rows that are read on the device, in layers with rows in host memory.
        layers: the number of layers with rows in host memory.
    """

    bus_bytes: float
    hot: float
    layers: int


def traffic(cache: Cache, seed: int = 0) -> Traffic:
    """Count the rows that a step reads, from the selection of the last offloaded layer for a random query.

    If host memory has arrays of the method's own (ShadowKV), the bytes come from the method's accounting.

    Args:
        cache: a cache after decoding.
        seed: seed of the query.
    """
    methods = layer_methods(cache.method, cache.model)
    hosted = [i for i, state in enumerate(cache.layers) if _caches(state)]
    if not hosted:
        return _accounted(cache)
    state = cache.layers[hosted[-1]]
    model, layer = cache.model, _caches(state)[0]
    groups = (model.num_kv_heads, model.num_q_heads // model.num_kv_heads)
    q, k, v = jax.random.split(jax.random.key(seed), 3)
    shapes = [(cache.batch, *groups, 1, model.head_dim), *[(cache.batch, groups[0], 1, model.head_dim)] * 2]
    query, key, value = (
        jax.random.normal(x, shape, layer.value.dtype) for x, shape in zip((q, k, v), shapes, strict=True)
    )
    inputs = Inputs(
        query=query,
        key=key,
        value=value,
        position=cache.length[:, None],
        tokens=jnp.ones((cache.batch, 1), jnp.int32),  # token 1 ends no sentence
        inv_freq=jnp.asarray(frequencies(layer_ropes(model)[hosted[-1]], model.head_dim)),
        shared=cache.shared,
    )
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
    return Traffic(bus_bytes=float(cold * row * len(hosted)), hot=1 - cold / attended, layers=len(hosted))


def _accounted(cache: Cache) -> Traffic:
    """Compute the traffic by `kvjax.api.measure`. Values are in host memory, and all that a step reads crosses the bus."""
    away = [x for x in map(_on_host, cache.layers) if x]
    if not away:
        return Traffic(bus_bytes=0.0, hot=1.0, layers=0)
    stats, value = measure(cache), away[0][0]
    bus_bytes = float(stats.bus_bytes.sum())
    rows = bus_bytes / (value.shape[3] * value.dtype.itemsize)
    attended = float(stats.attended.sum()) * value.shape[1] * len(away)
    return Traffic(bus_bytes=bus_bytes, hot=1 - rows / attended, layers=len(away))


def _on_host(state: Any) -> list[Array]:
    return [x for x in jax.tree.leaves(state) if on_host(x)]


def _caches(state: Any) -> list[OffloadedLayerCache]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, OffloadedLayerCache))
    return [x for x in leaves if isinstance(x, OffloadedLayerCache)]
