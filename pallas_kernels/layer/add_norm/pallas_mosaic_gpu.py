"""Sum and norm through Mosaic GPU, a program of one warpgroup for each row."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._mosaic_gpu.threads import THREADS

MOST_ROWS = 1024  # enough for a decode step; for the many rows of a prompt XLA is as good
MOST_WIDTH = 2**14  # one program holds a row in registers
TAKES = f"{arrays.HOPPER}, up to {MOST_ROWS} rows of a multiple of {THREADS} up to {MOST_WIDTH}"


def _vector(width, dtype):
    """Choose how many neighbouring elements a thread loads together; 0 if rows are no multiple of 128."""
    return next((n for n in (8, 4, 2, 1) if width % (n * THREADS) == 0 and n * jnp.dtype(dtype).itemsize <= 16), 0)


def _body(x_ref, update_ref, scale_ref, sum_ref, out_ref, *, layouts, eps):
    row, dtype = lax.axis_index("x"), sum_ref.dtype
    x, update, scale = (
        plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)
        for ref, layout in zip((x_ref.at[row], update_ref.at[row], scale_ref), layouts, strict=True)
    )
    # The sum is rounded to the stored dtype before the norm, as it is where sum and norm are separate operations.
    x = (x + update).astype(dtype)
    sum_ref[row] = x
    x = x.astype(jnp.float32)
    x = x * lax.rsqrt(jnp.sum(x * x) / x.shape[0] + eps)
    out_ref[row] = (x * scale).astype(dtype)


def add_norm(x, update, scale, eps):
    """Add an update, and normalise the sum."""
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    layout = plgpu.Layout.WG_STRIDED(
        (width,), vec_size=_vector(width, jnp.float32 if scale.dtype == jnp.float32 else x.dtype)
    )
    out = jax.ShapeDtypeStruct((rows, width), x.dtype)
    body = functools.partial(_body, layouts=(layout,) * 3, eps=eps)
    after, normed = arrays.program(body, [out, out], grid=(rows,))(*(y.reshape(rows, width) for y in (x, update)), scale)
    return after.reshape(x.shape), normed.reshape(x.shape)


def check(x, update, scale, eps):
    """Raise ``NotImplementedError`` for other GPUs, and for more or wider rows than the kernel is made for."""
    arrays.check_hopper()
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    if not 1 <= rows <= MOST_ROWS or not 1 <= width <= MOST_WIDTH or width % THREADS:
        raise NotImplementedError(
            f"got {rows} rows of {width}, expected 1 to {MOST_ROWS} of a multiple of {THREADS} to {MOST_WIDTH}"
        )
