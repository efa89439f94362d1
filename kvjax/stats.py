"""Accounting: what a method holds and reads, per row, from the state itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax.cache import Cache
from kvjax.memory import placed_bytes
from kvjax.method import num_bytes
from kvjax.step import layer_methods
from kvjax.typing import pytree, static


@pytree
class Stats:
    """Cost of decoding at the end of a `generate` call.

    The bytes of a decode step are split by what is read: `weight_bytes` once for all rows, then per row `kv_bytes` and
    `metadata_bytes`, of which `bus_bytes` come from host memory.
    """

    length: Array  # int32 [B], tokens seen
    attended: Array  # float32 [B], tokens a decode step attends to, mean over layers and KV heads
    kv_bytes: Array  # float32 [B], bytes of keys and values a decode step reads, all layers
    metadata_bytes: Array  # float32 [B], bytes of the method's metadata a decode step reads, all layers
    bus_bytes: Array  # float32 [B], bytes of `kv_bytes` that cross the bus from host memory, at least
    full_bytes_read: Array  # float32 [B], what `Full` would read
    counters: dict[str, Array]  # what the method counts, float32 [B] each, mean over the layers that count it
    resident_bytes: int = static()  # allocated by the cache, all rows and layers, free room included
    host_bytes: int = static(0)  # bytes of `resident_bytes` that are in pinned host memory
    weight_bytes: int = static(0)  # bytes of parameters a decode step reads; 0 where no parameters were given

    @property
    def bytes_read(self) -> Array:
        """Bytes of keys, values and metadata a decode step reads, all layers: float32 [B]."""
        return self.kv_bytes + self.metadata_bytes

    @property
    def selected_fraction(self) -> Array:
        """Attended tokens over tokens seen: float32 [B]."""
        return self.attended / jnp.maximum(self.length, 1).astype(jnp.float32)

    @property
    def is_no_op(self) -> Array:
        """Rows the method did nothing to (it attends to every token): bool [B]."""
        return self.attended >= self.length.astype(jnp.float32)

    def summary(self) -> str:
        """One line for people; it says so if the method did nothing at this length."""
        weights = f", and {self.weight_bytes / 1e6:.2f} MB of weights" if self.weight_bytes else ""
        far = float(self.bus_bytes.mean()) / 1e6
        text = (
            f"{float(self.attended.mean()):.0f} of {float(self.length.astype(jnp.float32).mean()):.0f} tokens attended "
            f"({100 * float(self.selected_fraction.mean()):.1f} %), {float(self.bytes_read.mean()) / 1e6:.2f} MB read per "
            f"step ({float(self.full_bytes_read.mean()) / 1e6:.2f} MB under Full) = "
            f"{float(self.kv_bytes.mean()) / 1e6:.2f} of keys and values + {float(self.metadata_bytes.mean()) / 1e6:.2f} of "
            f"metadata{f', {far:.2f} of them over the bus' if far else ''}{weights}, "
            f"{self.resident_bytes / 1e6:.1f} MB resident"
            + (f" ({self.host_bytes / 1e6:.1f} of them in host memory)" if self.host_bytes else "")
        )
        idle = int(self.is_no_op.sum())
        rows = self.length.shape[0]
        text += "".join(f", {name} {float(value.mean()):.3g}" for name, value in sorted(self.counters.items()))
        return text + (
            f"; no effect at this length in {idle} of {rows} rows: the budget covers every token" if idle else ""
        )


def measure(cache: Cache, params: Any = None) -> Stats:
    """Accounting of ``cache`` as it stands; ``params`` are the model's, for `Stats.weight_bytes`."""
    model = cache.model
    costs = [
        m.cost(state, cache.shared) for m, state in zip(layer_methods(cache.method, model), cache.layers, strict=True)
    ]
    row = 2 * model.head_dim * jnp.dtype(model.dtype).itemsize * model.num_kv_heads * model.num_layers
    return Stats(
        length=jnp.copy(cache.length),  # the next call consumes the cache
        attended=sum(c.attended for c in costs) / len(costs),
        kv_bytes=sum(c.kv_bytes for c in costs),
        metadata_bytes=sum(c.metadata_bytes for c in costs),
        bus_bytes=sum(c.bus_bytes for c in costs) + jnp.zeros_like(costs[0].kv_bytes),
        full_bytes_read=cache.length.astype(jnp.float32) * row,
        counters=_mean_counters([c.counters for c in costs]),
        resident_bytes=num_bytes((cache.layers, cache.shared)),
        host_bytes=placed_bytes((cache.layers, cache.shared))[1],
        weight_bytes=0 if params is None else model.weight_bytes(params, cache.batch),
    )


def _mean_counters(layers: list[Mapping[str, Array]]) -> dict[str, Array]:
    names = dict.fromkeys(name for counters in layers for name in counters)
    found = {name: [counters[name] for counters in layers if name in counters] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}
