"""Matrices of weights in 8 or 4 bits: codes, a scale for each group of a row, and possibly a smallest number for each group.

A matrix W [N, K] multiplies vectors of K numbers. Its rows are cut into groups of K / G neighbouring numbers, and a number is
``code * scale + minimum`` with the scale and the minimum of its group; without minima it is ``code * scale``.

* 8 bits: int8 codes in the order of their numbers. With one group (G = 1) the scale of a row multiplies the finished product.
* 4 bits: codes go from 0 to 15, groups have 32 numbers, and two groups are a chunk of 32 bytes: byte j has number j of the
  first group in its low bits and number j of the second group in its high bits.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

CHUNK = 64  # numbers
GROUP = 32  # numbers of a group in 4 bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedMatrix:
    """A matrix in 8 or 4 bits; an operation takes one where its docstring says so. N may be several axes.

    Attributes:
        codes: int8 [N, K] for 8 bits, uint8 [N, K / 2] for 4 bits.
        scales: float16 or float32 [N, G].
        minima: like ``scales``, or None where every minimum is 0.
    """

    codes: Array
    scales: Array
    minima: Array | None = None

    @property
    def bits(self) -> int:
        """8 or 4."""
        return _bits_of(self.codes)

    @property
    def width(self) -> int:
        """K, the numbers of a row."""
        return self.codes.shape[-1] * (8 // self.bits)

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes N."""
        return tuple(self.codes.shape[:-1])

    @property
    def by_row(self) -> bool:
        """Whether a row has one scale and no minimum."""
        return self.minima is None and self.scales.shape[-1] == 1

    @property
    def flat(self) -> CodedMatrix:
        """The matrix with one axis N."""
        return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), self)


def _bits_of(codes: Array) -> int:
    if codes.dtype not in (jnp.int8, jnp.uint8):
        raise TypeError(f"codes of a matrix must be int8 or uint8, got {codes.dtype}: they cannot be cast as numbers can")
    return 8 if codes.dtype == jnp.int8 else 4


def levels(codes: Array) -> Array:
    """Put codes into the order of their numbers: int8 [..., K], or uint8 [..., K / 2] to uint8 [..., K]."""
    if _bits_of(codes) == 8:
        return codes
    stored = codes.reshape(*codes.shape[:-1], -1, 1, GROUP)
    return jnp.concatenate([stored & 15, stored >> 4], axis=-2).reshape(*codes.shape[:-1], -1)


def packed[T: (Array, np.ndarray)](codes: T) -> T:
    """Store codes from 0 to 15, uint8 [..., K] with K a multiple of `CHUNK`, in 4 bits: [..., K / 2]."""
    lead = codes.shape[:-1]
    groups = codes.reshape(*lead, -1, 2, GROUP)
    return (groups[..., 0, :] | (groups[..., 1, :] << 4)).reshape(*lead, -1)


def decoded(matrix: CodedMatrix) -> Array:
    """Compute the numbers of a matrix, float32 [N, K]."""
    codes = levels(matrix.codes).astype(jnp.float32)
    groups = matrix.scales.shape[-1]
    numbers = codes.reshape(*codes.shape[:-1], groups, -1) * matrix.scales[..., None].astype(jnp.float32)
    if matrix.minima is not None:
        numbers = numbers + matrix.minima[..., None].astype(jnp.float32)
    return numbers.reshape(codes.shape)


def taken(matrix: CodedMatrix, rows: Array) -> Array:
    """Compute the rows [..., K] of a matrix [N, K] at ``rows`` int [...], float32; a row of N or more is NaN."""
    if rows.size == 1:  # for one row XLA for TPUs copies the table into another layout; for two it reads them in place
        return taken(matrix, jnp.broadcast_to(rows.reshape(1), (2,)))[0].reshape(*rows.shape, -1)
    inside = rows < matrix.codes.shape[0]
    found = decoded(jax.tree.map(lambda x: jnp.take(x, rows, axis=0, mode="clip"), matrix))
    return jnp.where(inside[..., None], found, jnp.nan)
