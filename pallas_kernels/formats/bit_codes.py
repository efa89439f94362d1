"""Codes of any number of bits, one for each slot, without a gap between them.

The least number of codes that fills whole bytes is one group: two codes of 12 bits in 3 bytes, for example. The first
code has the lowest bits of the first byte.
"""

import functools
import math
import operator

import jax.numpy as jnp
from jax import Array, lax


def together(bits: int) -> tuple[int, int]:
    """Return the number of codes in a group, which fills whole bytes, and the number of its bytes."""
    codes = 8 // math.gcd(bits, 8)
    return codes, codes * bits // 8


def _bytes_of(code: Array, slot: Array, bits: int) -> Array:
    """Place the bits of each code int32 [..., N] in the bytes of its group: uint8 [..., N, bytes]."""
    codes, size = together(bits)
    shift = lax.rem(slot, codes)[..., None] * bits - 8 * jnp.arange(size, dtype=jnp.int32).reshape((1,) * slot.ndim + (-1,))
    code = code[..., None]
    moved = jnp.where(shift >= 0, code << jnp.clip(shift, 0, 8), code >> jnp.clip(-shift, 0, 31))
    return (moved & 255).astype(jnp.uint8)


def pack(code: Array, bits: int) -> Array:
    """Pack S codes of each head into N groups, see `together`: uint8 [B, H, N, bytes].

    Args:
        code: int32 [B, H, S], below 2**bits.
        bits: bits of each code, at most 16.
    """
    codes, size = together(bits)
    code = jnp.pad(code, ((0, 0), (0, 0), (0, -code.shape[2] % codes)))
    made = _bytes_of(code, jnp.arange(code.shape[2], dtype=jnp.int32)[None, None], bits)
    made = made.reshape(*code.shape[:2], -1, codes, size)
    return jnp.sum(made, axis=3, dtype=jnp.uint8)


def add(packed: Array, code: Array, slot: Array, bits: int) -> Array:
    """Add the codes of slots that had code 0 to ``packed``.

    Args:
        packed: see `pack`.
        code: int32 [B, H, T].
        slot: int32 [B, T], each once; a slot behind the last code is dropped, and its code must be 0.
        bits: bits of each code, at most 16.
    """
    made = _bytes_of(code, jnp.broadcast_to(slot[:, None], code.shape), bits)
    row, group = jnp.arange(len(slot))[:, None], lax.div(slot, together(bits)[0])
    # No two codes share a bit.
    return packed.at[row, :, group].add(made.swapaxes(1, 2), mode="drop", wrap_negative_indices=False)


def unpack(packed: Array, slots: int, bits: int) -> Array:
    """Unpack the first S = ``slots`` codes: int32 [B, H, S]."""
    codes, _ = together(bits)
    made = []
    for at in range(codes):
        first, last = at * bits // 8, ((at + 1) * bits - 1) // 8
        parts = (packed[..., byte].astype(jnp.int32) << 8 * (byte - first) for byte in range(first, last + 1))
        made.append((functools.reduce(operator.or_, parts) >> (at * bits - 8 * first)) & ((1 << bits) - 1))
    return jnp.stack(made, axis=3).reshape(*packed.shape[:2], -1)[:, :, :slots]


def bits_of(count: int) -> int:
    """Count the bits of the largest number below ``count``."""
    return (count - 1).bit_length()
