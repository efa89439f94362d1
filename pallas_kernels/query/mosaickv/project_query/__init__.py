"""Queries in the basis of every segment of packed vectors (MosaicKV)."""

from typing import Annotated

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Operation
from pallas_kernels.formats.packed_vectors import TERMS
from pallas_kernels.query.mosaickv.project_query import pallas_mosaic_gpu, reference
from pallas_kernels.signature import declared, forward

PROJECT_QUERY = Operation.of("project_query", pallas_mosaic_gpu, reference)


@declared(PROJECT_QUERY)
def project_query(
    query: Annotated[Array, "B H G D"],
    basis: Annotated[Array, "float32 B H M D D"],
    *,
    dtype: DTypeLike,
    implementation: str | None = None,
    platform: str | None = None,
) -> Array:
    """Project queries onto the basis of every segment; the result is given as terms of ``dtype`` that add up to it.

    A product of a bfloat16 term and a bfloat16 value is exact in float32. So tensor cores compute scores that are as good as
    the scores of a float32 query.

    Args:
        basis: the rows of each are unit vectors.
        dtype: bfloat16, float16 or float32.

    Returns:
        [B, H, M, G, N, D] in ``dtype``, N terms each.
    """
    if str(jnp.dtype(dtype)) not in TERMS:
        raise ValueError(f"project_query: got dtype {dtype}, expected one of {list(TERMS)}")
    return forward(dtype=jnp.dtype(dtype))
