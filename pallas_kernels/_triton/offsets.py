"""The check for arrays that kernels of Pallas' Triton back end cannot address."""

from __future__ import annotations

from typing import Any


def check_bytes(*arrays: Any) -> None:
    """Raise ``NotImplementedError`` for arrays of one-byte elements that take 2 to 4 GiB.

    Pallas counts offsets in elements, with signed 32 bits for arrays of up to 4 GiB. An offset of 2**31 or more would wrap.
    Arrays of wider elements that fit in 4 GiB have fewer elements than that.
    """
    for x in arrays:
        if x.dtype.itemsize == 1 and 1 << 31 <= x.size <= 1 << 32:
            raise NotImplementedError(f"got {x.size} bytes of {x.dtype}, expected below 2 GiB or above 4 GiB")
