"""Checks that kernels for Pallas' Triton back end share; each raises ``NotImplementedError`` for what kernels do not take."""

from typing import Any


def check_dtypes(*arrays: Any) -> None:
    """Check that all arrays have one dtype, which products on tensor cores take."""
    dtypes = {str(x.dtype) for x in arrays}
    if dtypes not in ({"bfloat16"}, {"float16"}, {"float32"}):
        raise NotImplementedError(f"got dtypes {sorted(dtypes)}, expected one of bfloat16, float16, float32 for all")


def check_head_dim(dim: int, least: int = 16) -> None:
    """Check that the channels of a head are a block of a kernel."""
    if dim < least or dim > 256 or dim & (dim - 1):
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from {least} to 256")


def check_bytes(*arrays: Any) -> None:
    """Check that no array of one-byte elements takes 2 to 4 GiB.

    Pallas counts offsets in elements, with signed 32 bits for arrays of up to 4 GiB. An offset of 2**31 or more would wrap.
    Arrays of wider elements that fit in 4 GiB have fewer elements than that.
    """
    for x in arrays:
        if x.dtype.itemsize == 1 and 1 << 31 <= x.size <= 1 << 32:
            raise NotImplementedError(f"got {x.size} bytes of {x.dtype}, expected below 2 GiB or above 4 GiB")
