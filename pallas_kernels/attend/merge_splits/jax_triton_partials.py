"""Split-K attention through jax-triton: the call of a kernel of partial results, and how they join."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._triton.jax_triton_call import launch
from pallas_kernels._triton.pallas import pl
from pallas_kernels.attend.merge_splits import merge_splits


def attend(
    body: Any, config: Any, query: jax.Array, operands: tuple[jax.Array, ...], scale: float, **sizes: Any
) -> tuple[jax.Array, jax.Array]:
    """Run a kernel for query [B, H, G, D], then ``operands``; ``sizes`` are its parameters behind those of all kernels.

    Returns:
        out [B, H, G, D] in the dtype of the query, and lse float32 [B, H, G].
    """
    rows, heads, group, dim = query.shape
    shape = (rows * heads, config.splits, group)
    parts = launch(
        body,
        (query, *operands),
        (jax.ShapeDtypeStruct((*shape, dim), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)),
        grid=(rows, heads, config.splits), num_warps=config.num_warps, num_stages=config.num_stages,
        SCALE=scale, HEADS=heads, GROUP=group, FILLED=pl.next_power_of_2(group), DIM=dim,
        PRECISION="ieee" if query.dtype == jnp.float32 else "tf32", **sizes,
    )  # fmt: skip
    out, lse = merge_splits(*parts, dtype=query.dtype, platform="gpu")
    return out.reshape(query.shape), lse.reshape(query.shape[:3])
