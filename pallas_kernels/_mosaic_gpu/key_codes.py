"""4-bit codes of keys in arrays of registers, see `pallas_kernels.formats.key_codes`: entry i has channel i % D of a vector.

The additions have the same order as in plain JAX, whatever the array.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._triton.key_codes import parts_of
from pallas_kernels.formats.key_codes import LEVEL, LEVELS, SLICE, THRESHOLDS

DIMS = 8, 16, 32, 64, 128  # channels, so that threads of a program have those of one vector


def rotated(x: jax.Array, signs: Any, dim: int, scratch: Any) -> jax.Array:
    """Rotate vectors float32 [N] as `formats.key_codes.rotation` does; ``signs`` float32 [D] in global memory.

    ``scratch`` is shared memory, float32 [N].
    """
    channel, half = arrays.counted(x.shape[0]) & (dim - 1), 1
    x = x * arrays.load(signs, channel)
    while half < dim:
        other = arrays.exchanged(x, half, scratch)
        x = jnp.where((channel & half) > 0, other - x, x + other)
        half *= 2
    return x


def codes(y: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """Encode rotated vectors float32 [N]: for each entry the cluster of its slice, and its byte of the row, int32 [N]."""
    channel = arrays.counted(y.shape[0]) & (SLICE - 1)

    def added(x):
        for distance in (4, 2, 1):
            x = x + arrays.exchanged(x, distance, None)
        return x

    def exact_dot(a, b):  # the small products first
        return added(sum(x * z for x in reversed(a) for z in reversed(b)))

    parts = parts_of(y)
    radius = jnp.sqrt(exact_dot(parts, parts))
    size = jnp.abs(y) / jnp.maximum(radius, 1e-8)
    above = [size > threshold for threshold in THRESHOLDS]
    rank = sum(x.astype(jnp.int32) for x in above)
    steps = zip(above, LEVELS, LEVELS[1:], strict=False)
    level = sum((jnp.where(x, float(high - low), 0.0) for x, low, high in steps), start=jnp.full_like(y, LEVELS[0]))
    alpha = jnp.maximum(exact_dot((level,), parts_of(size)), 1e-6 / LEVEL)
    positive = (y >= 0).astype(jnp.int32)
    cluster, levels = added(positive << channel), added((rank | positive << 3) << (4 * channel))
    weight = lax.bitcast_convert_type(parts_of(radius * (scale / LEVEL) / alpha)[0], jnp.int32)
    word = jnp.where(channel < 4, levels, lax.shift_right_logical(weight, 16))
    return cluster, lax.shift_right_logical(word, 8 * (channel & 3)) & 0xFF
