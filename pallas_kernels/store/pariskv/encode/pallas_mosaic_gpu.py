"""4-bit codes of keys through Mosaic GPU: a program for some vectors, a slice of one for a thread."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.key_codes import DIMS, codes, rotated, store
from pallas_kernels._mosaic_gpu.threads import THREADS
from pallas_kernels.formats.key_codes import SLICE

TAKES = f"{arrays.HOPPER}, D a power of two from {DIMS[0]} to {DIMS[-1]}"


def _body(key_ref, valid_ref, *refs, heads, dim, shared, scale):
    # key [L * T, D]; valid [L, T], or [B, T] if shared; signs [D] if rotated; ids [L * T, D / 8], rows [L * T, D].
    *signs_ref, ids_ref, rows_ref = refs
    entry, lanes, tokens, count = arrays.counted(THREADS), dim // SLICE, valid_ref.shape[1], key_ref.shape[0]
    row, piece = lax.axis_index("x") * (THREADS // lanes) + lax.div(entry, lanes), lax.rem(entry, lanes)
    read = jnp.minimum(row, count - 1)
    line = lax.div(read, tokens)
    x = arrays.load_run(key_ref, piece * SLICE, SLICE, (read, dim))
    flag = arrays.load(valid_ref, lax.rem(read, tokens), rows=(lax.div(line, heads) if shared else line, tokens))
    coded = codes(rotated(x, signs_ref[0], dim) if signs_ref else x, scale)
    coded = tuple(jnp.where(flag > 0, x, 0) for x in coded)
    store(ids_ref, rows_ref, read, jnp.where(row < count, piece, -1), coded)


def encode(key, valid, signs, *, scale):
    """Encode vectors in 4 bits per channel."""
    batch, heads, tokens, dim = key.shape
    count = batch * heads * tokens
    body = functools.partial(_body, heads=heads, dim=dim, shared=valid.shape[1] == 1, scale=scale)
    out = [jax.ShapeDtypeStruct((count, size), jnp.uint8) for size in (dim // SLICE, dim)]
    made = arrays.program(body, out, grid=(-(-count * dim // (THREADS * SLICE)),))(
        key.reshape(count, dim), valid.reshape(-1, tokens), *(() if signs is None else (signs,))
    )
    return tuple(x.reshape(batch, heads, tokens, -1) for x in made)


def check(key, valid, signs, *, scale):
    """Raise ``NotImplementedError`` for other GPUs, dtypes, head dims and sizes than the kernel takes."""
    arrays.check_hopper()
    arrays.check_floats(key)
    if key.shape[3] not in DIMS or not key.size or key.size // key.shape[3] >= 2**31:
        raise NotImplementedError(f"got key {key.shape}, expected head_dim in {DIMS}")
