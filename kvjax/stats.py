"""Accounting: what a method holds and reads, per row, from the state itself."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from kvjax.cache import Cache
from kvjax.memory import placed_bytes
from kvjax.method import num_bytes
from kvjax.step import layer_methods
from kvjax.typing import pytree, static


@pytree
class Stats:
    """Cost of decoding at the end of a `generate` call; means over layers and KV heads where not said otherwise."""

    length: Array  # int32 [B], tokens seen
    attended: Array  # float32 [B], tokens a decode step attends to
    bytes_read: Array  # float32 [B], bytes of KV and metadata a decode step reads, all layers
    full_bytes_read: Array  # float32 [B], what `Full` would read
    counters: dict[str, Array]  # what the method counts, float32 [B] each, mean over the layers that count it
    resident_bytes: int = static()  # allocated by the cache, all rows and layers, free room included
    host_bytes: int = static(0)  # of them in pinned host memory

    @property
    def selected_fraction(self) -> Array:
        """Attended tokens over tokens seen: float32 [B]."""
        return self.attended / jnp.maximum(self.length, 1).astype(jnp.float32)

    @property
    def is_no_op(self) -> Array:
        """Rows the method did nothing to (it attends to every token): bool [B]."""
        return self.attended >= self.length.astype(jnp.float32)

    def summary(self) -> str:
        """One line for people; says so if the method did nothing at this length."""
        text = (
            f"{float(self.attended.mean()):.0f} of {float(self.length.astype(jnp.float32).mean()):.0f} tokens attended "
            f"({100 * float(self.selected_fraction.mean()):.1f} %), {float(self.bytes_read.mean()) / 1e6:.2f} MB read per "
            f"step ({float(self.full_bytes_read.mean()) / 1e6:.2f} MB under Full), "
            f"{self.resident_bytes / 1e6:.1f} MB resident"
            + (f" ({self.host_bytes / 1e6:.1f} of them in host memory)" if self.host_bytes else "")
        )
        idle = int(self.is_no_op.sum())
        rows = self.length.shape[0]
        text += "".join(f", {name} {float(value.mean()):.3g}" for name, value in sorted(self.counters.items()))
        return text + (
            f"; no effect at this length in {idle} of {rows} rows: the budget covers every token" if idle else ""
        )


def measure(cache: Cache) -> Stats:
    """Accounting of ``cache`` as it stands."""
    model = cache.model
    costs = [
        m.cost(state, cache.shared) for m, state in zip(layer_methods(cache.method, model), cache.layers, strict=True)
    ]
    row = 2 * model.head_dim * jnp.dtype(model.dtype).itemsize * model.num_kv_heads * model.num_layers
    return Stats(
        length=jnp.copy(cache.length),  # the next call consumes the cache
        attended=sum(c.attended for c in costs) / len(costs),
        bytes_read=sum(c.bytes_read for c in costs),
        full_bytes_read=cache.length.astype(jnp.float32) * row,
        counters=_mean_counters([c.counters for c in costs]),
        resident_bytes=num_bytes((cache.layers, cache.shared)),
        host_bytes=placed_bytes((cache.layers, cache.shared))[1],
    )


def _mean_counters(layers: list[dict[str, Array]]) -> dict[str, Array]:
    names = dict.fromkeys(name for counters in layers for name in counters)
    found = {name: [counters[name] for counters in layers if name in counters] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}
