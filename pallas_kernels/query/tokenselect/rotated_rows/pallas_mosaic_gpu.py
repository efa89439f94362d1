"""Listed rows, gathered and rotated through Mosaic GPU: a program for each row of the batch and block of entries."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.threads import THREADS
from pallas_kernels._triton.quantised import refuse_codes

RUN = 8  # neighbouring channels of a thread in each half of a row
TOGETHER = 4  # heads of a program, whose rows are on their way together
TAKES = f"{arrays.HOPPER}, D a power of two from {2 * RUN} to {2 * RUN * THREADS}, no codes"


def _body(key_ref, value_ref, token_ref, inv_freq_ref, key_out, value_out, *, heads, slots, width, dim):
    # key, value [B, H, S, D]; token [B, E]; inv_freq [D/2]; out [B, H, E, D].
    row, half = lax.axis_index("x"), dim // 2
    thread, lanes = arrays.counted(THREADS), half // RUN  # threads of a row
    place, first = lax.axis_index("y") * (THREADS // lanes) + lax.div(thread, lanes), lax.rem(thread, lanes) * RUN
    inside = place < width
    # An index out of range would read out of bounds.
    token = jnp.clip(arrays.load(token_ref, jnp.where(inside, row * width + place, -1)), 0, slots - 1)
    lines = [row * heads + jnp.minimum(lax.axis_index("z") * TOGETHER + i, heads - 1) for i in range(TOGETHER)]
    parts = [(ref, first + at) for ref in (key_ref, value_ref) for at in (0, half)]
    loaded = [[arrays.load_run(ref, at, RUN, (line * slots + token, dim)) for ref, at in parts] for line in lines]
    angle = arrays.repeated(place.astype(jnp.float32), RUN) * arrays.load_run(inv_freq_ref, first, RUN)
    cos, sin = arrays.cosine_sine(angle)  # the same for all heads
    low, high = (jnp.where(inside, first + at, -1) for at in (0, half))
    for line, (x, y, *values) in zip(lines, loaded, strict=True):
        for ref, pair in ((key_out, (x * cos - y * sin, y * cos + x * sin)), (value_out, values)):
            for at, some in zip((low, high), pair, strict=True):
                arrays.store_run(ref, at, some, (line * width + place, dim))


def rotated_rows(key, value, token, inv_freq):
    """Gather listed keys and values, and rotate the keys."""
    (batch, heads, slots, dim), width = key.shape, token.shape[1]
    rows = jax.ShapeDtypeStruct((batch, heads, width, dim), key.dtype)
    body = functools.partial(_body, heads=heads, slots=slots, width=width, dim=dim)
    grid = batch, -(-width * (dim // 2) // (THREADS * RUN)), -(-heads // TOGETHER)
    return tuple(arrays.program(body, [rows, rows], grid=grid)(key, value, token, inv_freq))


def check(key, value, token, inv_freq):
    """Raise ``NotImplementedError`` for other GPUs, codes, dtypes and head dims than the kernel takes."""
    arrays.check_hopper()
    refuse_codes(key, value)
    arrays.check_floats(key)
    batch, heads, slots, dim = key.shape
    if dim & (dim - 1) or not 2 * RUN <= dim <= 2 * RUN * THREADS or batch * heads * slots >= 2**31:
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from {2 * RUN} to {2 * RUN * THREADS}")
