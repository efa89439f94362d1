"""Checks of the codes that a GPU's kernels can read, and the blocks of codes that kernels multiply."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._triton.checks import check_bytes
from pallas_kernels.formats.quantised import Quantised, group_of
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
            if not packed and (store.packed or store.mixed or store.grouped):
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
    """Load ``at`` of a ref [B, H, S, D], codes as ``dtype``, and the codes' scales or None; ``at[:3]`` selects the slots.

    Codes of which each group has a scale are multiplied by it, so the numbers themselves are returned, and None.
    """
    if not isinstance(ref, Quantised):
        return ref[at], None
    *before, slots, part = at
    dim = ref.shape[3]
    first, size = (0, dim) if part == slice(None) else (part.start, part.size)

    def taken(x, column):
        slot = slots.start + jnp.arange(slots.size, dtype=jnp.int32)
        shape = slots.size, size
        return x[*before, jnp.broadcast_to(slot[:, None], shape), jnp.broadcast_to(column[None], shape)]

    if ref.packed:
        byte, shift = nibbles(first, size, dim)
        codes = unpacked(taken(ref.codes, byte), shift, dtype)
    else:
        codes = ref.codes[at].astype(dtype)
    if not ref.grouped:
        return codes, ref.scale[at[:3]]
    scale = taken(ref.scale, group_of(first + jnp.arange(size, dtype=jnp.int32), dim))
    return (codes.astype(jnp.float32) * scale.astype(jnp.float32)).astype(dtype), None


def nibbles(first: int, size: int, dim: int) -> tuple[jax.Array, jax.Array]:
    """Tell in which bytes channels ``first`` to ``first + size - 1`` of packed codes are, and their shifts: int32 [size].

    The shift brings a channel's 4 bits to the top of its byte. Each byte is loaded for both of its channels: the second time
    it is in the fastest cache.
    """
    channel = first + jnp.arange(size, dtype=jnp.int32)
    high = channel >= dim // 2
    return jnp.where(high, channel - dim // 2, channel), jnp.where(high, 0, 4)


def unpacked(codes: jax.Array, shift: jax.Array, dtype: Any) -> jax.Array:
    """Convert bytes int8 [N, D] with the `nibbles` shifts int32 [D] to codes in ``dtype``."""
    wide = jax.lax.shift_left(codes.astype(jnp.int32), jnp.broadcast_to(24 + shift[None], codes.shape))
    return (wide >> 28).astype(dtype)
