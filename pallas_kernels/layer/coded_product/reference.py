"""The product with a matrix in 8 or 4 bits in plain JAX. No decoded copy of the whole matrix is made."""

import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.formats.coded_matrix import CodedMatrix, decoded
from pallas_kernels.layer.add_norm.reference import rms_norm
from pallas_kernels.machine import current_machine

_TILE = 1 << 22  # decoded numbers at a time, at most
_LEAST = 16  # rows of the matrix in a tile, at least; a matrix whose rows no tile divides is decoded at once
_LAST = (((1,), (1,)), ((), ()))  # contracts the last axes of two matrices


def coded_product(
    x: Array,
    matrix: CodedMatrix,
    *,
    dtype: jnp.dtype,
    scale: Array | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: Array | None = None,
) -> Array:
    """Multiply in plain JAX, tile by tile; see `pallas_kernels.layer.coded_product.coded_product`.

    Compilers for TPUs and for GPUs with bfloat16 fuse the conversion of int8 into a product. They do not fuse what 4 bits
    need, and compilers for CPUs and older GPUs fuse neither: there a loop decodes and multiplies some rows of the matrix at
    a time.
    """
    if scale is not None:
        x = rms_norm(x, scale, eps)
    rows, flat = x.reshape(-1, x.shape[-1]), matrix.flat
    if flat.by_row:
        machine = current_machine()
        fused = machine.platform == "tpu" or (machine.has_kernels and x.dtype.itemsize == 2)
        made = _by_row(rows, flat) if fused else _tiled(_by_row, rows, flat)
    else:
        made = _tiled(_by_group, rows, flat)
    made = made.astype(dtype).reshape(*x.shape[:-1], *matrix.lead)
    if gated:
        gates, others = jnp.moveaxis(made, x.ndim - 1, 0)
        made = jax.nn.silu(gates) * others
    return made if residual is None else residual + made


def _by_row(rows: Array, matrix: CodedMatrix) -> Array:
    codes = matrix.codes.astype(rows.dtype)
    made = lax.dot_general(rows, codes, _LAST, preferred_element_type=jnp.float32)
    return made * matrix.scales[:, 0].astype(jnp.float32)[None]


def _by_group(rows: Array, matrix: CodedMatrix) -> Array:
    numbers = decoded(matrix).astype(rows.dtype)
    return lax.dot_general(rows, numbers, _LAST, preferred_element_type=jnp.float32)


def _tiled(product, rows: Array, matrix: CodedMatrix) -> Array:
    """Join the products float32 [B, N] with tiles of the matrix."""
    count, width = matrix.codes.shape[0], matrix.width
    tile = _largest_part(count, max(_LEAST, _TILE // width))
    if tile == count:
        return product(rows, matrix)
    tiles = jax.tree.map(lambda part: part.reshape(count // tile, tile, -1), matrix)
    made = lax.map(lambda part: product(rows, part), tiles)
    return jnp.moveaxis(made, 0, 1).reshape(len(rows), count)


def _largest_part(count: int, most: int) -> int:
    """Return the largest divisor of ``count`` up to ``most``, or ``count`` if that divisor is below `_LEAST`."""
    best = max(
        (d for n in range(1, math.isqrt(count) + 1) if count % n == 0 for d in (n, count // n) if d <= most), default=1
    )
    return best if best >= _LEAST else count
