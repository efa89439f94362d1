"""Vectors that are about to be multiplied with a matrix of codes, with what a kernel before the product has prepared."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

MOST_VECTORS = 4  # which kernels multiply as integers: more go through tensor cores


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Vectors of B rows in all, and the same vectors as integers, in the order in which words of codes multiply them.

    A word is 32 bits of codes: 4 codes in 8 bits, 8 codes in 4 bits; a row has W words. An integer of 16 bits times a power
    of two, its unit, is a number of the vector. The numbers that four words multiply, a piece, share a unit: 16 numbers in
    8 bits, 32 in 4 bits. A number is rounded by 2^-16 of the largest of its piece at most, and a bfloat16 above 1/128 of the
    largest is not rounded at all.

    Attributes:
        x: [..., K], the vectors.
        pairs: int32 [B, 2 P, W]; entry 2 p + j has integers 2 j and 2 j + 1 of the four that the bytes of a word multiply.
            P is 1 in 8 bits. In 4 bits it is 2: what the low codes of the four bytes multiply, and what the high codes do.
        pieces: float32 [B, 2 P - 1, W / 4]: the unit of each piece, which is NaN if a number is not finite; in 4 bits also
            the sum of the numbers that its low codes multiply, and the sum of those that its high codes multiply.
    """

    x: Array
    pairs: Array | None = None
    pieces: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the vectors."""
        return self.x.shape

    def astype(self, dtype: DTypeLike) -> Prepared | Array:
        """Return the vectors in a dtype; in another one than they have, without their integers."""
        return self if self.x.dtype == jnp.dtype(dtype) else self.x.astype(dtype)

    def integers(self, bits: int) -> tuple[Array, Array] | None:
        """Return pairs and pieces if they are for codes of so many bits."""
        if self.pairs is None or self.pieces is None or self.pairs.shape[1] != 16 // bits:
            return None
        return self.pairs, self.pieces


def integer_shapes(count: int, width: int, bits: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return shape and dtype of the pairs and of the pieces of ``count`` vectors of ``width`` numbers."""
    words, planes = width * bits // 32, 16 // bits
    pairs = jax.ShapeDtypeStruct((count, planes, words), jnp.int32)
    return pairs, jax.ShapeDtypeStruct((count, planes - 1, words // 4), jnp.float32)
