"""Checks of the codes that a GPU's kernels can read, and the blocks of codes that kernels multiply."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels._triton.offsets import check_bytes
from pallas_kernels.formats.quantised import Quantised
from pallas_kernels.host import Rows
from pallas_kernels.machine import KERNELS_FROM, current_machine

_FLOAT8_FROM = (8, 9)  # the oldest compute capability that converts float8_e4m3fn


def check_codes(*stores: Any, rows: Rows | None = None, packed: bool = False) -> None:
    """Raise ``NotImplementedError`` for codes that the GPU does not convert or that kernels cannot address.

    Args:
        *stores: keys or values of one cache, or codes.
        rows: the same cache's rows in host memory.
        packed: whether the kernel reads codes of 4 bits, or mixed codes; an operation that mixes its query has none.
    """
    capability = current_machine().capability or KERNELS_FROM
    for store in stores:
        if isinstance(store, Quantised):
            if not packed and (store.packed or store.mixed):
                raise NotImplementedError(f"got {store.name} codes, expected codes of 8 bits that are not mixed")
            if store.kind == "float8_e4m3fn" and capability < _FLOAT8_FROM:
                raise NotImplementedError(f"got {store.kind} on compute capability {capability}, expected {_FLOAT8_FROM}")
            check_bytes(store.codes)
    if rows is not None:
        check_bytes(rows.host)


def refuse_codes(*stores: Any) -> None:
    """Raise ``NotImplementedError`` for codes of any kind."""
    for store in stores:
        if isinstance(store, Quantised):
            raise NotImplementedError(f"got {store.name} codes, expected {store.dtype}")


def rows_and_scale(ref: Any, at: tuple, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """Load ``at`` of a ref [B, H, S, D], codes as ``dtype``, and the codes' scales or None; ``at[:3]`` selects the slots."""
    if isinstance(ref, Quantised):
        return ref.codes[at].astype(dtype), ref.scale[at[:3]]
    return ref[at], None
