"""Sum and norm as one Pallas Triton kernel, a program per row; XLA takes three launches of a microsecond and a half each."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt

MOST_ROWS = 1024  # enough for a decode step; for the many rows of a prompt XLA is as good
MOST_WIDTH = 2**14  # one program holds a row in registers


def _kernel(x_ref, update_ref, scale_ref, sum_ref, out_ref, *, width, block, eps):
    # Of one row: x, update, sum, out [D]; scale [D]. A block is D rounded up to a power of two, and the mask stops at D.
    column = jnp.arange(block, dtype=jnp.int32)
    inside = column < width
    x, update, scale = (plt.load(r.at[column], mask=inside, other=0) for r in (x_ref, update_ref, scale_ref))
    # The sum is rounded to the stored dtype before the norm, as it is where sum and norm are separate operations.
    x = (x.astype(jnp.float32) + update.astype(jnp.float32)).astype(sum_ref.dtype)
    plt.store(sum_ref.at[column], x, mask=inside)
    x = x.astype(jnp.float32)
    x = x * lax.rsqrt(jnp.sum(x * x) / width + eps)
    plt.store(out_ref.at[column], (x * scale.astype(jnp.float32)).astype(out_ref.dtype), mask=inside)


def add_norm(x, update, scale, eps, *, num_warps: int = 16, interpret=False):
    """Add an update, and normalise the sum; ``interpret=True`` runs anywhere, slowly."""
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    row = pl.BlockSpec((None, width), lambda i: (i, 0))
    out = jax.ShapeDtypeStruct((rows, width), x.dtype)
    block = pl.next_power_of_2(width)
    after, normed = triton_call(
        functools.partial(_kernel, width=width, block=block, eps=eps),
        grid=(rows,),
        in_specs=[row, row, pl.BlockSpec((width,), lambda i: (0,))],
        out_specs=[row, row],
        out_shape=[out, out],
        num_warps=min(num_warps, max(block // 256, 1)),
        num_stages=1,
        interpret=interpret,
        name="add_norm",
    )(x.reshape(rows, width), update.reshape(rows, width), scale)
    return after.reshape(x.shape), normed.reshape(x.shape)


def check(x, update, scale, eps):
    """Raise ``NotImplementedError`` for more or wider rows than the kernel is made for."""
    width, rows = x.shape[-1], math.prod(x.shape[:-1])
    if not 1 <= rows <= MOST_ROWS or not 1 <= width <= MOST_WIDTH:
        raise NotImplementedError(f"got {rows} rows of {width}, expected 1 to {MOST_ROWS} rows of at most {MOST_WIDTH}")
