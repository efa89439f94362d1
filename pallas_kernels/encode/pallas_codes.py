"""4-bit codes of vectors as a Pallas Triton kernel, and as a function of a block of registers.

The same additions in the same order as the plain version, whatever the block: a sum of two is the only sum whose order a
compiler cannot choose, so everything is added up in pairs. Only divisions may round differently from the plain version's.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.encode.reference import LEVEL, LEVELS, SLICE, THRESHOLDS, rows
from pallas_kernels.triton_call import triton_call


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
        part: vectors per program, a power of two.
        num_warps: warps per program.
    """

    part: int = 8
    num_warps: int = 4

    def __post_init__(self):
        if self.part < 1 or self.part & (self.part - 1):
            raise ValueError(f"encode: got part={self.part}, expected a power of two")


def rotated(x: jax.Array, signs: jax.Array) -> jax.Array:
    """`reference.rotation` of a block float32 [T, D]."""
    rows, dim = x.shape
    out = x * signs[None, :]
    second = jnp.arange(2, dtype=jnp.int32)[None, None, :, None] == 1
    half = 1
    while half < dim:
        pairs = out.reshape(rows, dim // (2 * half), 2, half)
        both, apart = jnp.sum(pairs, axis=2), jnp.sum(jnp.where(second, -pairs, pairs), axis=2)
        out = jnp.where(second, apart[:, :, None, :], both[:, :, None, :]).reshape(rows, dim)
        half *= 2
    return out


def codes(x: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """`reference.codes` of a block of rotated vectors float32 [T, D]: ids uint8 [T, N], and `reference.rows` uint8 [T, D]."""
    vectors, dim = x.shape
    slices = dim // SLICE
    y = x.reshape(vectors, slices, SLICE)
    parts = _parts(y)
    radius = jnp.sqrt(_exact_dot(parts, parts))
    size = jnp.abs(y) / jnp.maximum(radius, 1e-8)[:, :, None]
    rank = jnp.zeros(y.shape, jnp.int32)
    level = jnp.full(y.shape, LEVELS[0], jnp.float32)
    for threshold, low, high in zip(THRESHOLDS, LEVELS, LEVELS[1:], strict=False):
        rank = rank + (size > threshold).astype(jnp.int32)
        level = level + jnp.where(size > threshold, float(high - low), 0.0)
    alpha = jnp.maximum(_exact_dot((level,), _parts(size)), 1e-6 / LEVEL)
    positive = (y >= 0).astype(jnp.int32)
    channel = jnp.arange(SLICE, dtype=jnp.int32)[None, None, :]
    ids = jnp.sum(positive << channel, axis=2, dtype=jnp.int32)
    nibbles = (rank | positive << 3).reshape(vectors, dim // 2, 2)
    packed = jnp.sum(nibbles << (4 * jnp.arange(2, dtype=jnp.int32))[None, None, :], axis=2, dtype=jnp.int32)
    weight = radius * (scale / LEVEL) / alpha
    return ids.astype(jnp.uint8), rows(packed, weight.astype(jnp.bfloat16))


def _parts(x):
    """Three float32 of 8 significant bits each that add up to ``x``; by bits, as a detour through bfloat16 may be elided."""
    high = _rounded(x)
    rest = x - high
    middle = _rounded(rest)
    return high, middle, rest - middle


def _rounded(x):
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000, jnp.float32)


def _exact_dot(a, b):
    """Inner product over the last axis of sums of `_parts`, the small products first: float32 [T, N]."""
    rows, slices, length = b[0].shape
    total = jnp.zeros(b[0].shape, jnp.float32)
    for x in reversed(a):
        for y in reversed(b):
            total = total + x * y
    while length > 1:
        length //= 2
        total = jnp.sum(total.reshape(rows, slices, 2, length), axis=2)
    return total.reshape(rows, slices)


def _kernel(key_ref, valid_ref, *refs, part, scale):
    """Of one list: key [T, D], valid [T], signs [D] if rotated; ids [T, N], rows [T, D]."""
    *signs_ref, ids_ref, rows_ref = refs
    row = pl.program_id(2) * part + jnp.arange(part, dtype=jnp.int32)
    row = jnp.minimum(row, key_ref.shape[0] - 1)  # the last is encoded again, and written again with the same value
    valid = valid_ref[row][:, None]
    x = jnp.where(valid, key_ref[row, :].astype(jnp.float32), 0.0)
    made = codes(rotated(x, signs_ref[0][...]) if signs_ref else x, scale)
    for ref, new in zip((ids_ref, rows_ref), made, strict=True):
        ref[row, :] = jnp.where(valid, new, jnp.zeros_like(new))


def encode(key, valid, signs, *, scale, config: Config | None = None, interpret=False):
    """See ``pallas_kernels.encode.encode``; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, tokens, dim = key.shape
    config = Config() if config is None else config
    shared = valid.shape[1] == 1
    operands = [key, valid, *(() if signs is None else (signs,))]
    in_specs = [
        pl.BlockSpec((None, None, tokens, dim), lambda b, h, i: (b, h, 0, 0)),
        pl.BlockSpec((None, None, tokens), lambda b, h, i: (b, 0 if shared else h, 0)),
        *(() if signs is None else (pl.BlockSpec((dim,), lambda b, h, i: (0,)),)),
    ]
    outs = (dim // SLICE, dim)
    return tuple(
        triton_call(
            functools.partial(_kernel, part=config.part, scale=scale),
            grid=(batch, heads, pl.cdiv(tokens, config.part)),
            in_specs=in_specs,
            out_specs=[pl.BlockSpec((None, None, tokens, size), lambda b, h, i: (b, h, 0, 0)) for size in outs],
            out_shape=[jax.ShapeDtypeStruct((batch, heads, tokens, size), jnp.uint8) for size in outs],
            name="encode",
            num_warps=config.num_warps,
            interpret=interpret,
        )(*operands)
    )


def check(key, valid, signs, *, scale):
    """Raise ``NotImplementedError`` for what the kernel does not take."""
    dim = key.shape[3]
    if dim < 16 or dim > 256 or dim & (dim - 1):
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from 16 to 256")
    if not key.size or 1 << 31 <= key.size < 1 << 32:
        raise NotImplementedError(f"got key {key.shape}, expected rows below 2 GiB or of at least 4 GiB")
