"""The limits of kernels for TPUs: dtypes, head dims, pieces of arrays that are whole tiles, and where arrays lie."""

from typing import Any

import jax

from pallas_kernels._mosaic.pallas import plt
from pallas_kernels.formats.quantised import Quantised

LANES = 128  # numbers in a row of a tile
_MOST_BYTES = 1 << 21  # of a block; two blocks of keys and of values are in the 16 MiB that a kernel may have by default
SUBLANES = 8  # rows of a tile; two numbers of 16 bits share a place


def tile_rows(x: jax.Array) -> int:
    """Return the rows of a tile of fast memory: 8 rows of 32-bit elements, 16 rows of 16-bit elements."""
    return SUBLANES * 4 // x.dtype.itemsize


def check_dtypes(*arrays: Any) -> None:
    """Raise ``NotImplementedError`` for codes, and for dtypes that a TPU does not multiply."""
    for x in arrays:
        if isinstance(x, Quantised):
            raise NotImplementedError(f"got {x.name} codes, expected {x.dtype}")
    dtypes = {str(x.dtype) for x in arrays}
    if not dtypes <= {"bfloat16", "float32"}:
        raise NotImplementedError(f"got dtypes {sorted(dtypes)}, expected bfloat16 or float32")


def check_cache(x: Any) -> None:
    """Raise ``NotImplementedError`` for x [B, H, S, D] that XLA does not store slot by slot, in whole tiles.

    XLA lays out arrays so that tiles have the least padding. Other shapes have slots or heads along the last axes, and XLA
    would copy the whole array before the kernel, to bring it into the order that kernels expect.
    """
    slots, dim = x.shape[2:]
    if dim % LANES:
        raise NotImplementedError(f"got head_dim {dim}, expected a multiple of {LANES}, the length of a tile's rows")
    if slots % SUBLANES:
        raise NotImplementedError(f"got {slots} slots, expected a multiple of {SUBLANES}, the rows of a tile")


def check_heads(x: Any) -> None:
    """Raise ``NotImplementedError`` for x [B, H, S, D] with so many heads that the least block of them fills fast memory."""
    needed = LANES * x.shape[1] * x.shape[3] * x.dtype.itemsize
    if needed > _MOST_BYTES:
        raise NotImplementedError(f"got {needed:,} bytes in {LANES} slots of all heads, expected at most {_MOST_BYTES:,}")


def where_it_is(x: jax.Array) -> jax.Array:
    """Keep ``x`` in the device's memory as an operand.

    XLA may otherwise move an array as a whole into fast memory before a kernel reads a small part of it, and back afterwards.
    """
    return plt.with_memory_space_constraint(x, plt.HBM)
