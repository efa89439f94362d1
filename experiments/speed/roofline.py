"""The memory roofline: the read bandwidth, measured in the same run, and the memory of a device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.speed.device_time import loop_seconds
from kvjax.protocol.method import num_bytes

_WIDTHS = (2048, 4096, 16384)  # elements of a row; the fastest width differs between devices


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """The read bandwidth of a device.

    Attributes:
        bytes_per_second: the median of the fastest variant.
        size: bytes that a pass reads.
        variants: bytes per second of each variant that was tried.
    """

    bytes_per_second: float
    size: int
    variants: dict[str, float]

    def seconds(self, size: float) -> float:
        """Return the seconds to read ``size`` bytes."""
        return size / self.bytes_per_second


def measure_bandwidth(size: int | None = None) -> Bandwidth:
    """Measure the read bandwidth of the default device: the best of several reductions over a bfloat16 array.

    Args:
        size: bytes; None takes 4 GiB on an accelerator and 32 MiB on a CPU.
    """
    if size is None:
        size = 2**25 if jax.default_backend() == "cpu" else 2**32
    widest = max(_WIDTHS)
    rows = max(1, size // (2 * widest))
    # The bits differ, so that nothing on the way can compress them.
    flat = jax.jit(lambda: jax.lax.iota(jnp.uint32, rows * widest).astype(jnp.uint16).view(jnp.bfloat16))()
    flat = jax.block_until_ready(flat)
    variants = {}
    for width in _WIDTHS:
        runs = {"sum": _sum, "product": _product} if width == _WIDTHS[1] else {"sum": _sum}
        for name, run in runs.items():
            weights = jnp.ones((width,), jnp.bfloat16)
            took = loop_seconds(run, weights, flat.reshape(-1, width), chain=4, iterations=4, repeats=5)
            variants[f"{name} of rows of {width}"] = num_bytes(flat) / took.median
    return Bandwidth(bytes_per_second=max(variants.values()), size=num_bytes(flat), variants=variants)


def _sum(weights: Array, x: Array) -> Array:
    return jnp.sum(x, axis=1, dtype=jnp.float32)


def _product(weights: Array, x: Array) -> Array:
    return jnp.einsum("rc,c->r", x, weights, preferred_element_type=jnp.float32)


def of_device(tree: Any) -> Any:
    """Return the shapes of the parts of arrays on a device; arrays on a single device keep their shapes."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype), tree)


def peak_bytes() -> int | None:
    """Return the most bytes that this process has ever held on the device; None if the device does not report them."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def bytes_limit() -> int | None:
    """Return the bytes that this process may allocate on the device; None if the device does not report them."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
