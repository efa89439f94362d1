"""The memory roofline: read bandwidth measured here and now, and the bytes that a decode step cannot do without."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.speed.device_time import loop_seconds
from kvjax.method import num_bytes
from models import ModelConfig

_WIDTHS = (2048, 4096, 16384)  # elements of a row; which one streams fastest differs by device


@dataclasses.dataclass(frozen=True)
class Bandwidth:
    """What a streaming reduction reads.

    Attributes:
        bytes_per_second: of the fastest variant, by its median.
        size: bytes read by one pass.
        variants: bytes per second of each variant tried.
    """

    bytes_per_second: float
    size: int
    variants: dict[str, float]

    def seconds(self, size: float) -> float:
        """Time to read ``size`` bytes."""
        return size / self.bytes_per_second


def measure_bandwidth(size: int | None = None) -> Bandwidth:
    """Read bandwidth of the default device: the best of several reductions over one bfloat16 array.

    Args:
        size: bytes; None takes 4 GiB on an accelerator and 32 MiB on a CPU.
    """
    if size is None:
        size = 2**25 if jax.default_backend() == "cpu" else 2**32
    widest = max(_WIDTHS)
    rows = max(1, size // (2 * widest))
    # Bits that differ, so that nothing on the way could shorten them.
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


def weight_bytes(params: Any, config: ModelConfig, batch: int) -> int:
    """Bytes of parameters that a decode step of ``batch`` rows reads: all but unread rows of the embedding."""
    table = params["embed"]["embedding"]
    if config.tie_word_embeddings:
        return num_bytes(params)
    return num_bytes(params) - num_bytes(table) + batch * config.hidden_size * table.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Roofline:
    """A measured time beside the least that memory allows.

    Attributes:
        bytes_read: that must be read.
        floor: seconds to read them.
        ratio: measured over floor.
        achieved: bytes per second, `bytes_read` over the measured time.
    """

    bytes_read: float
    floor: float
    ratio: float
    achieved: float


def roofline(bytes_read: float, seconds: float, bandwidth: Bandwidth) -> Roofline:
    """Compares a measured time with the floor of what had to be read."""
    floor = bandwidth.seconds(bytes_read)
    return Roofline(bytes_read=bytes_read, floor=floor, ratio=seconds / floor, achieved=bytes_read / seconds)
