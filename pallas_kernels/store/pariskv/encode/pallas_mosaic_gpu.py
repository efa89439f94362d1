"""4-bit codes of keys through Mosaic GPU: a program for some vectors, a channel of each for a thread."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.key_codes import DIMS, codes, rotated
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._mosaic_gpu.threads import THREADS
from pallas_kernels.formats.key_codes import SLICE

EACH = 8  # channels of a thread
TAKES = f"{arrays.HOPPER}, D a power of two from {DIMS[0]} to {DIMS[-1]}"


def _body(key_ref, valid_ref, *refs, heads, dim, shared, scale):
    # key [L * T, D]; valid [L, T], or [B, T] if shared; signs [D] if rotated; ids [L * T, D / 8], rows [L * T, D].
    *signs_ref, ids_ref, rows_ref, scratch = refs
    entry, tokens, count = arrays.counted(THREADS * EACH), valid_ref.shape[1], key_ref.shape[0]
    row, channel = lax.axis_index("x") * (THREADS * EACH // dim) + lax.div(entry, dim), lax.rem(entry, dim)
    inside = row < count
    read = jnp.minimum(row, count - 1)
    line = lax.div(read, tokens)
    flag = arrays.load(valid_ref, lax.rem(read, tokens), rows=(lax.div(line, heads) if shared else line, tokens))
    x = arrays.load(key_ref, jnp.where(inside & (flag > 0), channel, -1), rows=(read, dim))
    cluster, byte = codes(rotated(x, signs_ref[0], dim, scratch) if signs_ref else x, scale)
    first = inside & ((channel & (SLICE - 1)) < 1)
    at = jnp.where(first, lax.div(channel, SLICE), -1)
    arrays.store(ids_ref, at, jnp.where(flag > 0, cluster, 0), (read, dim // SLICE))
    arrays.store(rows_ref, jnp.where(inside, channel, -1), jnp.where(flag > 0, byte, 0), (read, dim))


def encode(key, valid, signs, *, scale):
    """Encode vectors in 4 bits per channel."""
    batch, heads, tokens, dim = key.shape
    count = batch * heads * tokens
    body = functools.partial(_body, heads=heads, dim=dim, shared=valid.shape[1] == 1, scale=scale)
    out = [jax.ShapeDtypeStruct((count, size), jnp.uint8) for size in (dim // SLICE, dim)]
    scratch = [plgpu.SMEM((THREADS * EACH,), jnp.float32)]
    made = arrays.program(body, out, grid=(-(-count * dim // (THREADS * EACH)),), scratch=scratch)(
        key.reshape(count, dim), valid.reshape(-1, tokens), *(() if signs is None else (signs,))
    )
    return tuple(x.reshape(batch, heads, tokens, -1) for x in made)


def check(key, valid, signs, *, scale):
    """Raise ``NotImplementedError`` for other GPUs, dtypes, head dims and sizes than the kernel takes."""
    arrays.check_hopper()
    arrays.check_floats(key)
    if key.shape[3] not in DIMS or not key.size or key.size // key.shape[3] >= 2**31:
        raise NotImplementedError(f"got key {key.shape}, expected head_dim in {DIMS}")
