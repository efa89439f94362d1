"""4-bit codes of a block of keys inside a kernel, see `pallas_kernels.formats.key_codes`.

The additions have the same order as in the plain version, whatever the block. A sum of two numbers is the only sum whose
order a compiler cannot choose, so everything is added up in pairs. Only divisions may round differently.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.key_codes import LEVEL, LEVELS, SLICE, THRESHOLDS, rows


def rotated(x: jax.Array, signs: jax.Array) -> jax.Array:
    """Rotate a block float32 [T, D] as `formats.key_codes.rotation` does."""
    rows, dim = x.shape
    out = x * signs[None, :]
    # Each round joins neighbours at a distance of `half`: their sum and their difference, both as sums of two numbers.
    second = jnp.arange(2, dtype=jnp.int32)[None, None, :, None] == 1
    half = 1
    while half < dim:
        pairs = out.reshape(rows, dim // (2 * half), 2, half)
        both, apart = jnp.sum(pairs, axis=2), jnp.sum(jnp.where(second, -pairs, pairs), axis=2)
        out = jnp.where(second, apart[:, :, None, :], both[:, :, None, :]).reshape(rows, dim)
        half *= 2
    return out


def codes(x: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """Encode a block of rotated vectors float32 [T, D]: ids uint8 [T, N] and rows uint8 [T, D], see `formats.key_codes`."""
    vectors, dim = x.shape
    slices = dim // SLICE
    y = x.reshape(vectors, slices, SLICE)
    parts = parts_of(y)
    radius = jnp.sqrt(_exact_dot(parts, parts))
    size = jnp.abs(y) / jnp.maximum(radius, 1e-8)[:, :, None]
    # The rank of a channel's level is the number of thresholds that it exceeds.
    rank = jnp.zeros(y.shape, jnp.int32)
    level = jnp.full(y.shape, LEVELS[0], jnp.float32)
    for threshold, low, high in zip(THRESHOLDS, LEVELS, LEVELS[1:], strict=False):
        rank = rank + (size > threshold).astype(jnp.int32)
        level = level + jnp.where(size > threshold, float(high - low), 0.0)
    alpha = jnp.maximum(_exact_dot((level,), parts_of(size)), 1e-6 / LEVEL)
    # The signs of a slice are one byte, its cluster; a channel's code is a nibble of sign and rank.
    positive = (y >= 0).astype(jnp.int32)
    channel = jnp.arange(SLICE, dtype=jnp.int32)[None, None, :]
    ids = jnp.sum(positive << channel, axis=2, dtype=jnp.int32)
    nibbles = (rank | positive << 3).reshape(vectors, dim // 2, 2)
    packed = jnp.sum(nibbles << (4 * jnp.arange(2, dtype=jnp.int32))[None, None, :], axis=2, dtype=jnp.int32)
    weight = radius * (scale / LEVEL) / alpha
    return ids.astype(jnp.uint8), rows(packed, weight.astype(jnp.bfloat16))


def parts_of(x):
    """Split ``x`` into three float32 numbers of 8 significant bits each that add up to it.

    They are made by bits, because a compiler may leave out a conversion to bfloat16 and back.
    """
    high = _rounded(x)
    rest = x - high
    middle = _rounded(rest)
    return high, middle, rest - middle


def _rounded(x):
    """Round ``x`` float32 to the nearest bfloat16, ties to even, kept as float32."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000, jnp.float32)


def _exact_dot(a, b):
    """Multiply two sums of `parts_of` over the last axis: float32 [T, N], the small products first, then added in pairs."""
    rows, slices, length = b[0].shape
    total = jnp.zeros(b[0].shape, jnp.float32)
    for x in reversed(a):
        for y in reversed(b):
            total = total + x * y
    while length > 1:
        length //= 2
        total = jnp.sum(total.reshape(rows, slices, 2, length), axis=2)
    return total.reshape(rows, slices)
