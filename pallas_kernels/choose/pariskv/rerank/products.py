"""Products of the query with decoded keys, in registers: 16 bytes of a row, which are two slices, become one sum.

The assembly looks the levels up with byte permutations instead of memory, so no thread waits.
"""

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._triton.assembly import assembly
from pallas_kernels.formats.key_codes import SIGNED_LEVELS, SLICE, parts_of_rows

PACK = 16  # bytes of a row per piece of assembly
_ABOVE = 1 << 13  # more than any level: added to it, a signed level is a positive number of 16 bits
_WHOLE = 0x4B000000  # bits of the float32 2**23: a whole number in its lowest bits is added to it exactly


def products(rows: Array, query: Array, interpret: bool) -> Array:
    """Sum over slices of weight times (levels . query), float32 [P]: rows uint8 [P, D] of P keys, query float32 [D]."""
    keys, dim = rows.shape
    if interpret:
        magnitudes, weight = parts_of_rows(rows)
        nibbles = jnp.stack([magnitudes & 15, magnitudes >> 4], axis=-1).reshape(keys, dim).astype(jnp.int32)
        level = sum(jnp.where(nibbles == i, float(y), 0.0) for i, y in enumerate(SIGNED_LEVELS))
        dots = jnp.sum((level * query[None, :]).reshape(keys, dim // SLICE, SLICE), axis=2)
        return jnp.sum(dots * weight.astype(jnp.float32), axis=1)
    bits = assembly(program(PACK), [rows, jnp.broadcast_to(query[None, :], rows.shape)], PACK)
    # Only the first of 16 numbers is not zero. As whole numbers, because the assembler then removes the additions of zero.
    bits = jnp.sum(bits.reshape(keys, dim // PACK, PACK), axis=2, dtype=jnp.int32)
    return jnp.sum(lax.bitcast_convert_type(bits, jnp.float32), axis=1)


def program(results: int) -> str:
    """Write PTX that computes $0, the bits of a float32, from four words of a row and 16 channels of the query.

    They come behind the ``results``, of which all but the first are 0.
    """
    numbers = [level + _ABOVE for level in SIGNED_LEVELS]
    negative, positive = _bytes_of(numbers[:8]), _bytes_of(numbers[8:])
    lines = [".reg .b32 rank, up, sign, low, high, other, pair; .reg .f32 x, sum, total; mov.f32 total, 0f00000000;"]
    # A slice is two words: eight nibbles, and a bfloat16 weight. `rank` gets the levels without signs.
    for slice_ in range(2):
        word, weight = f"${results + 2 * slice_}", f"${results + 2 * slice_ + 1}"
        lines.append(f"and.b32 rank, {word}, 0x77777777; shl.b32 up, {word}, 4; mov.f32 sum, 0f00000000;")
        for half in range(2):
            if half:
                lines.append("shr.u32 rank, rank, 16;")
            # A nibble's sign is the highest bit of a byte: in `up` for a low nibble, in the word for a high nibble. The
            # permutation copies the sign over a byte for each of four nibbles.
            lines.append(f"prmt.b32 sign, up, {word}, {0xD9C8 + 0x2222 * half:#x};")
            # The low and the high bytes of four levels, looked up for both signs; the sign chooses between them.
            for name, at in (("low", 0), ("high", 2)):
                lines.append(f"prmt.b32 {name}, {positive[at]}, {positive[at + 1]}, rank;")
                lines.append(f"prmt.b32 other, {negative[at]}, {negative[at + 1]}, rank;")
                lines.append(f"lop3.b32 {name}, sign, {name}, other, 0xca;")
            # Join the bytes to 16-bit numbers, put them into the lowest bits of 2**23, and subtract that and `_ABOVE`.
            for two in range(2):
                lines.append(f"prmt.b32 pair, low, high, {(0x5140, 0x7362)[two]:#x};")
                for one in range(2):
                    channel = results + 4 + SLICE * slice_ + 4 * half + 2 * two + one
                    lines.append(f"prmt.b32 other, pair, {_WHOLE:#x}, {(0x7610, 0x7632)[one]:#x}; mov.b32 x, other;")
                    lines.append(f"sub.f32 x, x, 0f4B002000; fma.rn.f32 sum, x, ${channel}, sum;")
        lines.append(f"shl.b32 other, {weight}, 16; mov.b32 x, other; fma.rn.f32 total, sum, x, total;")
    lines += ["mov.b32 $0, total;", *(f"mov.b32 ${i}, 0;" for i in range(1, results))]
    return "{" + " ".join(lines) + "}"


def _bytes_of(numbers: list[int]) -> list[str]:
    """Format eight 16-bit numbers as PTX: two words of their low bytes, two words of their high bytes."""
    quarters = [(numbers[first : first + 4], shift) for shift in (0, 8) for first in (0, 4)]
    return [f"{sum((x >> shift & 255) << 8 * i for i, x in enumerate(four)):#x}" for four, shift in quarters]
