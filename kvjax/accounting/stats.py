"""Accounting: the tokens and bytes that a method holds and reads, computed from its state."""

import dataclasses
import functools
import operator
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from kvjax.cache import Cache
from kvjax.cache.quantised import row_bytes
from kvjax.decoding.layer_bytes import placed_bytes
from kvjax.decoding.layers import layer_methods, on_model
from kvjax.decoding.recurrent import row_bytes as state_bytes
from kvjax.protocol.describe import count_rows, describe_numbers, megabytes
from kvjax.protocol.method import num_bytes
from kvjax.protocol.typing import layer_recurrence, layer_windows, pytree, static, traced, values_are_keys
from pallas_kernels import axes

_ROUNDING = 1e-4  # relative error of sums in float32


@pytree
class Stats:
    """The cost of a decode step at the end of a `generate` call.

    A step reads `weight_bytes` once for all rows. For each row it reads `kv_bytes` and `metadata_bytes`; of `kv_bytes`,
    `bus_bytes` come from host memory.
    """

    length: Array = traced("int32 [B], tokens seen")
    attended: Array = traced("float32 [B], tokens that a step attends to, mean over layers with attention and KV heads")
    kv_bytes: Array = traced(
        "float32 [B], bytes of keys, values and the state of recurrent layers that a step reads, all layers"
    )
    metadata_bytes: Array = traced("float32 [B], bytes of the method's metadata that a step reads, all layers")
    bus_bytes: Array = traced("float32 [B], at least so many of `kv_bytes` cross the bus from host memory")
    visible: Array = traced(
        "float32 [B], tokens that a step of `Full` attends to, like `attended`; `length` if there are no windows"
    )
    full_bytes_read: Array = traced("float32 [B], bytes that `Full` would read in a cache of this kv_dtype")
    counters: dict[str, Array] = traced("the method's own statistics, float32 [B] each, mean over the layers that have them")
    resident_bytes: int = static("allocated by the cache, all rows and layers, free room included")
    host_bytes: int = static("the part of `resident_bytes` in pinned host memory", default=0)
    weight_bytes: int = static("bytes of parameters that a step reads; 0 if no parameters were given", default=0)

    def __repr__(self) -> str:
        return (
            f"Stats({count_rows(self.length)}, {describe_numbers(self.attended)} of {describe_numbers(self.length)} tokens "
            f"attended, {megabytes(self.resident_bytes)} resident)"
        )

    @property
    def bytes_read(self) -> Array:
        """Bytes of keys, values and metadata that a step reads, all layers: float32 [B]."""
        return self.kv_bytes + self.metadata_bytes

    @property
    def is_no_op(self) -> Array:
        """Rows in which the method reads what `Full` reads, so that it has no effect: bool [B]. `Verified` may read more."""
        alike = (self.attended >= self.visible) & (self.attended <= self.visible * (1 + _ROUNDING))
        return alike & (self.kv_bytes >= self.full_bytes_read * (1 - _ROUNDING))

    def summary(self) -> str:
        """Write one line for people. It says so if the method had no effect at this length."""
        weights = f", {self.weight_bytes / 1e6:.2f} MB of weights for all rows" if self.weight_bytes else ""
        far = float(self.bus_bytes.mean()) / 1e6
        attended, length = float(self.attended.mean()), float(self.length.astype(jnp.float32).mean())
        text = (
            f"{attended:.0f} of {length:.0f} tokens attended ({100 * attended / max(length, 1):.1f} %), "
            f"{float(self.bytes_read.mean()) / 1e6:.2f} MB read per step and row "
            f"({float(self.full_bytes_read.mean()) / 1e6:.2f} MB under Full) = "
            f"{float(self.kv_bytes.mean()) / 1e6:.2f} of keys and values{f' ({far:.2f} over the bus)' if far else ''} + "
            f"{float(self.metadata_bytes.mean()) / 1e6:.2f} of metadata{weights}, "
            f"{self.resident_bytes / 1e6:.1f} MB resident"
            + (f" ({self.host_bytes / 1e6:.1f} of them in host memory)" if self.host_bytes else "")
        )
        idle = int(self.is_no_op.sum())
        rows = self.length.shape[0]
        text += "".join(f", {name} {float(value.mean()):.3g}" for name, value in sorted(self.counters.items()))
        return text + (
            f"; no effect at this length in {idle} of {rows} rows: the method attends to every token" if idle else ""
        )


def with_bytes(stats: Stats, cache: Cache, params: Any) -> Stats:
    """Add what only arrays know, and tracers do not: the bytes in host memory, and the bytes of weights."""
    return dataclasses.replace(
        stats,
        host_bytes=placed_bytes((cache.layers, cache.shared))[1],
        weight_bytes=0 if params is None else cache.model.weight_bytes(params, cache.batch),
    )


def step_cost(cache: Cache) -> Stats:
    """Compute the cost of the next decode step without the fields that `with_bytes` adds; it can be traced."""
    model = cache.model
    methods, count, source = layer_methods(cache.method, model), model.num_layers, on_model(cache.method, model).source
    signals: dict[int | None, Any] = {at: m.signal(cache.layers[at]) for at, m in enumerate(methods)}
    states = [m.with_signal(cache.layers[at], signals.get(source(at, count))) for at, m in enumerate(methods)]
    costs = [m.cost(state, cache.shared) for m, state in zip(methods, states, strict=True)]
    length = cache.length.astype(jnp.float32)
    recurrence = layer_recurrence(model)
    attending = [cost for cost, state in zip(costs, recurrence, strict=True) if state is None]
    fixed = sum(state_bytes(state) for state in recurrence if state is not None)
    windows = [window for window, state in zip(layer_windows(model), recurrence, strict=True) if state is None]
    seen = [length if window is None else jnp.minimum(length, window) for window in windows]
    heads, once = model.num_kv_heads, values_are_keys(model)
    # Bytes of a token; layers with a window keep the dtype of the model.
    row = [
        heads * row_bytes(model.head_dim, model.dtype, cache.kv_dtype if window is None else None, once) for window in windows
    ]
    full = _sum(x * size for x, size in zip(seen, row, strict=True))  # what `Full` reads of layers with attention
    counters: dict[str, list[Array]] = {}
    for name, value in (entry for cost in costs for entry in cost.counters.items()):
        counters.setdefault(name, []).append(value)
    return Stats(
        length=jnp.copy(cache.length),  # the next call consumes the cache
        # Devices that share the heads have equally many heads.
        attended=axes.mean(_sum(c.attended for c in attending) / len(attending)),
        kv_bytes=axes.total(_sum(c.kv_bytes for c in costs)),
        metadata_bytes=axes.total(_sum(c.metadata_bytes for c in costs)),
        bus_bytes=axes.total(sum(c.bus_bytes for c in costs) + jnp.zeros_like(costs[0].kv_bytes)),
        visible=_sum(seen) / len(seen),
        full_bytes_read=axes.total(full + fixed if fixed else full),
        counters=jax.tree.map(axes.mean, {name: _sum(values) / len(values) for name, values in counters.items()}),
        resident_bytes=num_bytes((cache.layers, cache.shared)),
    )


def _sum(arrays: Iterable[Array]) -> Array:
    return functools.reduce(operator.add, arrays)
