"""Merges the partial results of split-K attention."""

from typing import Annotated

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.attend.merge_splits import pallas_triton, reference
from pallas_kernels.dispatch import Operation
from pallas_kernels.signature import declared, forward

MERGE_SPLITS = Operation.of("merge_splits", pallas_triton, reference)


@declared(MERGE_SPLITS)
def merge_splits(
    out: Annotated[Array, "float32 L N>=1 G D"],
    lse: Annotated[Array, "float32 L N G"],
    *,
    dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple[Array, Array]:
    """Merge attention to N disjoint parts into attention to their union: `numerics.merge_partials` in one kernel.

    Args:
        out: softmax over each part's own slots.
        lse: log of each part's softmax denominator. It is -inf for an empty part, whose ``out`` may hold anything.
        dtype: of the merged output.

    Returns:
        out [L, G, D] in ``dtype`` and lse float32 [L, G]; 0 and -inf where every part is empty.
    """
    return forward()
