"""4-bit codes of keys and the rotation before them, in plain JAX (ParisKV).

The codes of a vector do not depend on how many other vectors are encoded with it, to the last bit. Additions run in a fixed
order. A product that is added to a sum is exact, so it does not matter whether a compiler fuses the two operations.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

SLICE = 8  # channels per slice; with 8 the cluster of a slice is one byte
CLUSTERS = 1 << SLICE
LEVEL = 2.0**-12
# Of |u_j|, u uniform on the sphere in 8 dimensions; rounded to bfloat16, as in ParisKV's code, they are multiples of LEVEL.
THRESHOLDS = tuple(LEVEL * units for units in (346, 696, 1056, 1432, 1840, 2288, 2832))
LEVELS = (172, 520, 872, 1240, 1624, 2048, 2528, 3120)  # times LEVEL; whole numbers, so that products are exact
SIGNED_LEVELS = tuple(-level for level in LEVELS) + LEVELS  # by nibble: bit 3 sign (1 is >= 0), bits 0-2 level
ROW = 8  # bytes per slice of a row: four of levels, two of the weight, two of padding


def rotation(x: Array, signs: Array) -> Array:
    """Apply a randomised Hadamard transform without its factor 1/sqrt(D): [..., D] of any float dtype to float32 [..., D].

    It takes log2(D) rounds of butterfly additions. Their order does not depend on the shape, as it would in a matrix
    product.
    """
    dim = x.shape[-1]
    out = x.astype(jnp.float32) * signs.reshape((1,) * (x.ndim - 1) + (dim,))
    half = 1
    while half < dim:
        pairs = out.reshape(*x.shape[:-1], dim // (2 * half), 2, half)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        out = jnp.stack([first + second, first - second], axis=-2).reshape(x.shape)
        half *= 2
    return out


def codes(rotated: Array, scale: float) -> tuple[Array, Array, Array]:
    """Encode rotated vectors float32 [..., D], see ``pallas_kernels.store.pariskv.encode.encode``.

    Returns:
        ids uint8 [..., N], magnitudes uint8 [..., D/2] and weight bfloat16 [..., N], with N = D / 8.
    """
    lead, dim = rotated.shape[:-1], rotated.shape[-1]
    y = rotated.reshape(*lead, dim // SLICE, SLICE)
    parts = _parts(y)
    radius = jnp.sqrt(_exact_dot(parts, parts))
    size = jnp.abs(y) / jnp.maximum(radius, 1e-8)[..., None]  # |u_j|, u the direction of the slice
    above = [size > threshold for threshold in THRESHOLDS]
    rank = sum(x.astype(jnp.int32) for x in above)
    level = LEVELS[0] + sum(
        jnp.where(x, float(high - low), 0.0) for x, low, high in zip(above, LEVELS, LEVELS[1:], strict=False)
    )
    alpha = jnp.maximum(_exact_dot((level,), _parts(size)), 1e-6 / LEVEL)
    positive = (y >= 0).astype(jnp.int32)
    bits = jnp.arange(SLICE, dtype=jnp.int32).reshape((1,) * (y.ndim - 1) + (SLICE,))
    ids = jnp.sum(positive << bits, axis=-1, dtype=jnp.int32)
    nibbles = (rank | positive << 3).reshape(*lead, dim // 2, 2)
    return (
        ids.astype(jnp.uint8),
        (nibbles[..., 0] | nibbles[..., 1] << 4).astype(jnp.uint8),
        (radius * (scale / LEVEL) / alpha).astype(jnp.bfloat16),
    )


def rows(magnitudes: Array, weight: Array) -> Array:
    """Arrange codes as they are stored: magnitudes uint8 [..., D/2] and weight bfloat16 [..., N] to uint8 [..., D].

    The codes of a slice are 8 bytes, and slices stand one behind the other. So the codes of a key are one line of memory at
    D = 128, which one access reads. Two random reads, of 64 and of 32 bytes, take longer, though they read a quarter less.
    """
    lead, slices = weight.shape[:-1], weight.shape[-1]
    byte = jnp.arange(ROW, dtype=jnp.int32).reshape((1,) * len(weight.shape) + (ROW,))
    quarter = jnp.arange(ROW // 2, dtype=jnp.int32).reshape((1,) * len(weight.shape) + (ROW // 2,))
    levels = magnitudes.astype(jnp.int32).reshape(*lead, slices, ROW // 2) << (8 * quarter)
    levels = jnp.sum(levels, axis=-1, dtype=jnp.int32)[..., None]
    bits = lax.bitcast_convert_type(weight, jnp.uint16).astype(jnp.int32)[..., None]
    word = jnp.where(byte < ROW // 2, levels, bits)
    return ((word >> (8 * (byte & 3))) & 0xFF).astype(jnp.uint8).reshape(*lead, slices * ROW)


def parts_of_rows(stored: Array) -> tuple[Array, Array]:
    """Split rows uint8 [..., D] into magnitudes uint8 [..., D/2] and weight bfloat16 [..., N], the inverse of `rows`."""
    lead, dim = stored.shape[:-1], stored.shape[-1]
    slices = stored.reshape(*lead, dim // ROW, ROW)
    low, high = (slices[..., i].astype(jnp.uint16) for i in (4, 5))
    weight = lax.bitcast_convert_type(low | high << 8, jnp.bfloat16)
    return slices[..., : ROW // 2].reshape(*lead, dim // 2), weight


def cluster_counts(ids: Array, live: Array) -> Array:
    """Count each cluster's keys, int32 [B, H, N, 256]: ids uint8 [B, H, S, N] of keys with ``live`` bool [B, H, S]."""
    batch, heads, keys, slices = ids.shape
    b, h, n = (
        jnp.arange(size).reshape([-1 if axis == at else 1 for axis in range(4)])
        for at, size in ((0, batch), (1, heads), (3, slices))
    )
    empty = jnp.zeros((batch, heads, slices, CLUSTERS), jnp.int32)
    return empty.at[b, h, n, ids.astype(jnp.int32)].add(live.astype(jnp.int32)[..., None])


def estimate(query: Array, magnitudes: Array, weight: Array, scale: float) -> Array:
    """Estimate q.k from the codes of k.

    Args:
        query: float32 [B, H, D], rotated.
        magnitudes: uint8 [B, H, K, D/2], the levels and signs of K keys.
        weight: bfloat16 [B, H, K, N].
        scale: as in `pallas_kernels.store.pariskv.encode.encode`.

    Returns:
        float32 [B, H, K].
    """
    batch, heads, keys, _ = magnitudes.shape
    slices = weight.shape[-1]
    nibbles = jnp.stack([magnitudes & 15, magnitudes >> 4], axis=-1).astype(jnp.int32)
    signed = np.array(SIGNED_LEVELS, np.float32)
    direction = jnp.take(jnp.asarray(signed), nibbles, mode="clip").reshape(batch, heads, keys, slices, SLICE)
    dots = jnp.sum(direction * query.reshape(batch, heads, 1, slices, SLICE), axis=-1)
    total = jnp.sum(dots * weight.astype(jnp.float32), axis=-1) * (scale * LEVEL)
    return jnp.where(total == 0, 0.0, total)  # -0 would lose a tie against 0


def _parts(x: Array) -> tuple[Array, Array, Array]:
    """Split ``x`` into three float32 numbers of 8 significant bits each that add up to it: products of parts are exact."""
    high = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
    rest = x - high
    middle = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
    return high, middle, rest - middle


def _exact_dot(a: tuple[Array, ...], b: tuple[Array, ...]) -> Array:
    """Multiply two sums of `_parts` over the last axis, a power of two long; the small products are added first."""
    total = jnp.zeros_like(b[0])
    for x in reversed(a):
        for y in reversed(b):
            total = total + x * y
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return total[..., 0]
