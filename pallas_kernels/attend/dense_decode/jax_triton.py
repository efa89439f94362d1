"""The kernel of `pallas_triton` through jax-triton."""

import jax.numpy as jnp

from pallas_kernels._triton.jax_triton_call import launch, package
from pallas_kernels._triton.pallas import pl
from pallas_kernels._triton.quantised import refuse_codes
from pallas_kernels.attend.dense_decode import pallas_triton
from pallas_kernels.attend.merge_splits.jax_triton_partials import merged, partial_shapes


def dense_decode(query, key, value, *, position, limit, scale, config=None):
    """Attend with one query per head to all tokens below a limit, by jax-triton."""
    from pallas_kernels.attend.dense_decode import jax_triton_body

    rows, heads, group, dim = query.shape
    slots = key.shape[2]
    if config is None:
        config = pallas_triton.fitted(pallas_triton.default_config(rows * heads, slots), query, dim)
    out, lse = launch(
        jax_triton_body._partial,
        (query, key, value, position, limit),
        partial_shapes(query, config.splits),
        grid=(rows, heads, config.splits),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        SCALE=scale,
        HEADS=heads,
        GROUP=group,
        FILLED=pl.next_power_of_2(group),
        DIM=dim,
        SLOTS=slots,
        PRECISION="ieee" if query.dtype == jnp.float32 else "tf32",
        BLOCK=min(config.block, 1 << (slots.bit_length() - 1)),
    )
    return merged(out, lse, query)


def check(query, key, value, *, position, limit, scale):
    """Raise ``NotImplementedError`` where "pallas_triton" does, for codes, and where the package is missing."""
    pallas_triton.check(query, key, value, position=position, limit=limit, scale=scale)
    refuse_codes(key, value)
    package()
