"""Matrices of weights in 8 or 4 bits: codes, a scale for each group of a row, and possibly a smallest number for each group.

A matrix W [N, K] multiplies vectors of K numbers. Its rows are cut into groups of K / G neighbouring numbers, and a number is
``code * scale + minimum`` with the scale and the minimum of its group; without minima it is ``code * scale``.

Rows are stored in chunks of 64 numbers, in an order in which a kernel that reads 16 bits at a time finds neighbours:

* 8 bits: bytes 2j and 2j + 1 of a chunk are the int8 codes of the numbers j and 32 + j. With one group (G = 1) the scale of a
  row multiplies the finished product. Rows that are no whole number of chunks keep the order of their numbers.
* 4 bits: codes go from 0 to 15. Byte 2j has the numbers j and 16 + j, byte 2j + 1 the numbers 32 + j and 48 + j, the first of
  them in its low bits. Groups have 32 numbers.
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
    lead = codes.shape[:-1]
    if _bits_of(codes) == 8:
        if codes.shape[-1] % CHUNK:
            return codes
        return codes.reshape(*lead, -1, CHUNK // 2, 2).swapaxes(-1, -2).reshape(*lead, -1)
    words = codes.reshape(*lead, -1, CHUNK // 4, 2)
    places = jnp.stack([words & 15, words >> 4], axis=-1)  # [..., chunks, 16, byte, place]
    return jnp.moveaxis(places, -3, -1).reshape(*lead, -1)


def paired[T: (Array, np.ndarray)](x: T) -> T:
    """Put numbers or codes [..., K] into the order of stored codes of 8 bits."""
    if x.shape[-1] % CHUNK:
        return x
    return x.reshape(*x.shape[:-1], -1, 2, CHUNK // 2).swapaxes(-1, -2).reshape(x.shape)


def packed[T: (Array, np.ndarray)](codes: T) -> T:
    """Store codes from 0 to 15, uint8 [..., K] with K a multiple of `CHUNK`, in 4 bits: [..., K / 2]."""
    lead = codes.shape[:-1]
    places = codes.reshape(*lead, -1, 2, 2, CHUNK // 4)  # [..., chunks, byte, place, 16]
    words = places[..., 0, :] | (places[..., 1, :] << 4)
    return words.swapaxes(-1, -2).reshape(*lead, -1)


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
