"""Partial results of split-K attention through jax-triton: their shapes, and how they join."""

import jax
import jax.numpy as jnp

from pallas_kernels.attend.merge_splits import merge_splits


def partial_shapes(query: jax.Array, splits: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return the shapes of partials for query [B, H, G, D], N = ``splits``: out [B*H, N, G, D], lse [B*H, N, G], float32."""
    rows, heads, group, dim = query.shape
    shape = (rows * heads, splits, group)
    return jax.ShapeDtypeStruct((*shape, dim), jnp.float32), jax.ShapeDtypeStruct(shape, jnp.float32)


def merged(out: jax.Array, lse: jax.Array, query: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge the partials: out [B, H, G, D] in the dtype of the query, and lse float32 [B, H, G]."""
    out, lse = merge_splits(out, lse, dtype=query.dtype, platform="gpu")
    return out.reshape(query.shape), lse.reshape(query.shape[:3])
