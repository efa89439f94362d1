"""What kernels of Pallas' Triton back end cannot address."""

from __future__ import annotations

from typing import Any


def check_bytes(*arrays: Any) -> None:
    """Raise ``NotImplementedError`` for numbers of a byte that take 2 to 4 GiB.

    Pallas counts offsets in numbers, and takes signed ones of 32 bits for arrays of up to 4 GiB: of numbers of a byte, those
    above 2 GiB would wrap. Wider numbers are fewer.
    """
    for x in arrays:
        if x.dtype.itemsize == 1 and 1 << 31 <= x.size <= 1 << 32:
            raise NotImplementedError(f"got {x.size} bytes of {x.dtype}, expected below 2 GiB or above 4 GiB")
