"""ParisKV's codes of keys: sign clusters, 4-bit channels and a weight per slice, and the index that is kept of them."""

from __future__ import annotations

from pallas_kernels.encode.codes import ENCODE, encode
from pallas_kernels.encode.store import STORE_CODES, histogram, store_codes

__all__ = ["ENCODE", "STORE_CODES", "encode", "histogram", "store_codes"]
