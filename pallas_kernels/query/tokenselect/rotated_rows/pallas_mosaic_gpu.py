"""Listed rows, gathered and rotated through Mosaic GPU: a program for each row of the batch and block of entries."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.threads import THREADS
from pallas_kernels._triton.quantised import refuse_codes

EACH = 16  # pairs of channels of a thread and head
TAKES = f"{arrays.HOPPER}, D a power of two up to {THREADS * EACH}, no codes"


def _body(key_ref, value_ref, token_ref, inv_freq_ref, key_out, value_out, *, heads, slots, width, dim):
    # key, value [B, H, S, D]; token [B, E]; inv_freq [D/2]; out [B, H, E, D].
    row, half = lax.axis_index("x"), dim // 2
    pair = arrays.counted(THREADS * EACH)
    place, channel = lax.axis_index("y") * (THREADS * EACH // half) + lax.div(pair, half), lax.rem(pair, half)
    inside = place < width
    # An index out of range would read out of bounds.
    token = jnp.clip(arrays.load(token_ref, jnp.where(inside, row * width + place, -1)), 0, slots - 1)
    angle = place.astype(jnp.float32) * arrays.load(inv_freq_ref, channel)
    cos, sin = jnp.cos(angle), jnp.sin(angle)  # the same for all heads
    low, high = (jnp.where(inside, channel + i, -1) for i in (0, half))
    for head in range(heads):
        line = row * heads + head
        source, target = (line * slots + token, dim), (line * width + place, dim)
        first, second, *values = (arrays.load(ref, at, rows=source) for ref in (key_ref, value_ref) for at in (low, high))
        arrays.store(key_out, low, first * cos - second * sin, target)
        arrays.store(key_out, high, second * cos + first * sin, target)
        for at, x in zip((low, high), values, strict=True):
            arrays.store(value_out, at, x, target)


def rotated_rows(key, value, token, inv_freq):
    """Gather listed keys and values, and rotate the keys."""
    (batch, heads, slots, dim), width = key.shape, token.shape[1]
    rows = jax.ShapeDtypeStruct((batch, heads, width, dim), key.dtype)
    body = functools.partial(_body, heads=heads, slots=slots, width=width, dim=dim)
    grid = batch, -(-width * (dim // 2) // (THREADS * EACH))
    return tuple(arrays.program(body, [rows, rows], grid=grid)(key, value, token, inv_freq))


def check(key, value, token, inv_freq):
    """Raise ``NotImplementedError`` for other GPUs, codes, dtypes and head dims than the kernel takes."""
    arrays.check_hopper()
    refuse_codes(key, value)
    arrays.check_floats(key)
    batch, heads, slots, dim = key.shape
    if dim & (dim - 1) or not 2 <= dim <= THREADS * EACH or batch * heads * slots >= 2**31:
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two up to {THREADS * EACH}")
