"""Products of a single row, as two equal rows where XLA would not use a matrix product.

XLA for GPUs turns the product of one row and a matrix of less than ten million elements into a multiplication and a
reduction. The multiplication rounds to the dtype of the row before anything is added. With jaxlib 0.11 it is a kernel of its
own, which writes an array of the matrix's size: on two H200, the output projection of half of an 8B layer ([2048] by
[2048, 4096]) took 21 us, and the output projection of the whole layer 10 us. For two equal rows XLA makes a matrix product,
which also reads the matrix once.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.machine import current_machine

_SMALL = 10_000_000  # the threshold of openxla/xla, xla/backends/gpu/transforms/dot_strength_reduction.cc


def multiplied(product: Callable[[jax.Array], jax.Array], x: jax.Array, width: int) -> jax.Array:
    """Compute ``product(x)``, of two equal rows where one row alone would not be a matrix product.

    Args:
        product: from [B, T, K] to [B, T, ...]; it treats every row alike.
        x: [B, T, K].
        width: elements of a row of the product; the matrix has K * width elements.
    """
    rows, inner = x.shape[:2], x.shape[2]
    alone = rows == (1, 1) and x.dtype.itemsize == 2 and inner * width < _SMALL
    if not alone or not current_machine().has_kernels:
        return product(x)
    return product(jnp.broadcast_to(x, (1, 2, inner)))[:, :1]
