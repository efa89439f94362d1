"""Queries in the basis of every segment, in plain JAX."""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.formats.packed_vectors import split_terms


def project_query(query: Array, basis: Array, *, dtype: jnp.dtype) -> Array:
    """Project queries onto the basis of every segment, in plain JAX."""
    projected = jnp.einsum("bhgd,bhmed->bhmge", query.astype(jnp.float32), basis, precision=lax.Precision.HIGHEST)
    return split_terms(projected, dtype)
