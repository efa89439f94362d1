"""Codes of 8 and 4 bits as operands of tensor cores, at few instructions for each code.

Half the bytes leave half the time for every code, and a conversion of each code to bfloat16 takes more than that. So:

* Keys in int8 are multiplied as int8. A query is divided by its largest size and written as two digits in base 254; both
  digits are rows of one product. The integer sum is exact; a query is rounded by 1 / 64,516 of its largest value at most.
* Other codes are read in pairs of neighbouring channels, 16 bits each. A tensor core wants registers with two slots of one
  channel, and moves 16 bits at a time: a register with two pairs becomes one of the even and one of the odd channel, by
  arithmetic on both halves at once. Even channels and odd channels are products of their own.
* A tensor core multiplies 16 rows; a thread has two of them, 8 rows apart. If both were the same value the compiler would
  copy registers before each product, so 8 rows or fewer are filled up to 16 by other means: `folded`.

Two codes of 4 bits share a byte, of channels that are D / 2 apart. Keys are multiplied as int8 too: the 4 bits at the top of
a byte are a code times 16, so two instructions at most make four of them. Each half of a query is multiplied by the codes of
its channels. Of values, 16 bits have four channels, and each becomes bfloat16 in three instructions at most for two slots. So
values are four arrays, and each of them is a group of channels that can have a scale of its own: then each array has weights
of its own, which is a few instructions for each slot and query head, and none for each code.

A cache in float8_e4m3fn has no exact digits. Its keys become float16, which has an instruction for it, and the query float16
times a power of two; its values become bfloat16 like those in int8, because weights need the range.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels._triton.assembly import assembly
from pallas_kernels._triton.pallas import pl, plt

ROWS = 8  # query heads of a program, at least
LEAST_WIDTH = 32  # numbers of a key or a value, the least that a product of bytes takes
_BASE = 254  # a digit goes from -127 to 127
_FLOAT16_TOP = 14  # the largest number of a query is about 2^14

# Values of a channel as bfloat16, over this unit.
UNIT = {"int8": 2.0**-6, "float8_e4m3fn": 1.0, "int4": 1.0}
# The bits of a byte u are a bfloat16 too, u * 2^-133, below the normal numbers or just among them. A code + 128 is such a
# byte, so one multiplication by 2^127 and addition of -2 gives code * 2^-6.
_INT8 = "xor.b32 x, $1, 0x80808080; {} mov.b32 m, 0x7F007F00; mov.b32 a, 0xC000C000; fma.rn.bf16x2 $0, x, m, a;"
# Sign, exponent and mantissa go to their places in a bfloat16, which then is 2^-120 of the number.
_FLOAT8 = (
    "{} and.b32 m, x, 0x7F007F00; shr.u32 m, m, 4; lop3.b32 x, x, 0x80008000, m, 0xEA; mov.b32 m, 0x7B807B80; "
    "mov.b32 a, 0x80008000; fma.rn.bf16x2 $0, x, m, a;"
)
_VALUES = {
    ("int8", 0): _INT8.format("and.b32 x, x, 0x00FF00FF;"),
    ("int8", 1): _INT8.format("prmt.b32 x, x, 0, 0x4341;"),
    ("float8_e4m3fn", 0): _FLOAT8.format("shl.b32 x, $1, 8;"),
    ("float8_e4m3fn", 1): _FLOAT8.format("mov.b32 x, $1;"),
}
# 4 bits with the first of them flipped are code + 8; behind the bits of 128 they make a bfloat16 of 136 + code.
_INT4 = (
    "{}lop3.b32 x, x, 0x000F000F, 0x43084308, 0x6A; mov.b32 m, 0x3F803F80; mov.b32 a, 0xC308C308; fma.rn.bf16x2 $0, x, m, a;"
)
_VALUES |= {
    ("int4", which): _INT4.format(f"shr.u32 x, $1, {4 * which}; " if which else "mov.b32 x, $1; ") for which in range(4)
}
_NIBBLES = ("{.reg .b32 x; shl.b32 x, $1, 4; and.b32 $0, x, 0xF0F0F0F0;}", "and.b32 $0, $1, 0xF0F0F0F0;")
_KEYS = "{{.reg .b32 x; .reg .b16 h; prmt.b32 x, $1, 0, {}; cvt.u16.u32 h, x; cvt.rn.f16x2.e4m3x2 $0, h;}}"


def pairs(codes: Array) -> Array:
    """View codes of D bytes as int16 [..., D / 2], outside of a kernel; the bytes stay."""
    return lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2), jnp.int16)


def words(x: Array) -> Array:
    """View numbers of 16 bits as int32 [..., N / 2], outside of a kernel: two neighbours are one word."""
    return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2), jnp.int32)


def both_of(word: Array) -> tuple[Array, Array]:
    """Take the two bfloat16 of each of the `words`, as float32: of the even, and of the odd places."""
    even, odd = (lax.bitcast_convert_type(x, jnp.float32) for x in (word << 16, word & -65536))
    return even, odd


def scales_of(pair: Sequence[Array]) -> list[Array]:
    """Take the scales of the groups from each slot's two `words` int32 [N], in the order of `values`: float32 [N] each."""
    (even, odd), (even_behind, odd_behind) = map(both_of, pair)
    return [even, even_behind, odd, odd_behind]


def key_operand(codes: Array) -> Array:
    """Return the operand from which a kernel reads keys: the codes if they are int8, else their `pairs`."""
    return codes if codes.dtype == jnp.int8 else pairs(codes)


def _codes(both: Array, kind: str, odd: int) -> Array:
    # What assembly does, where a kernel is interpreted.
    return lax.bitcast_convert_type((both >> (8 * odd)).astype(jnp.int8), jnp.dtype(kind))


def channels(kind: str, dim: int) -> list[Array]:
    """List the channels of each array that `values` returns, int32."""
    if kind == "int4":
        even = 2 * jnp.arange(dim // 4, dtype=jnp.int32)
        return [even, even + dim // 2, even + 1, even + dim // 2 + 1]
    even = 2 * jnp.arange(dim // 2, dtype=jnp.int32)
    return [even, even + 1]


def values(both: Array, kind: str, interpret: bool) -> tuple[Array, ...]:
    """Convert `pairs` [N, P] to arrays of `channels`, bfloat16 [N, P] times `UNIT`; finite, whatever the bytes."""
    count = 4 if kind == "int4" else 2
    if interpret and kind == "int4":
        return tuple(((((both >> (4 * which)) & 15) ^ 8) - 8).astype(jnp.bfloat16) for which in range(count))
    if interpret:
        numbers = (_codes(both, kind, odd).astype(jnp.float32) for odd in (0, 1))
        even, odd = (jnp.where(x == x, x * UNIT[kind], 0).astype(jnp.bfloat16) for x in numbers)
        return even, odd
    return tuple(
        assembly(f"{{.reg .b32 x, m, a; {_VALUES[kind, which]}}}", [both], pack=2, result=jnp.bfloat16)
        for which in range(count)
    )


def _int8_keys(both: Array, interpret: bool) -> tuple[Array, Array]:
    """Convert bytes int8 [N, P] with two int4 codes each to int8 codes times 16: of the low bits, and of the high bits."""
    if interpret:
        return both << 4, both & -16
    low, high = (assembly(program, [both], pack=4, result=jnp.int8) for program in _NIBBLES)
    return low, high


def _float16_keys(both: Array, kind: str, interpret: bool) -> tuple[Array, Array]:
    if interpret:
        return _codes(both, kind, 0).astype(jnp.float16), _codes(both, kind, 1).astype(jnp.float16)
    even, odd = (assembly(_KEYS.format(order), [both], pack=2, result=jnp.float16) for order in ("0x4420", "0x4431"))
    return even, odd


def folded(x: Array, fold: int) -> Array:
    """Repeat ``x`` [R, ...] ``fold`` times, one copy behind the other: [fold * R, ...]."""
    if fold == 1:
        return x
    return jnp.broadcast_to(x[None], (fold, *x.shape)).reshape(fold * x.shape[0], *x.shape[1:])


def query_operand(ref: Any, at: tuple, head: Array, kind: str) -> tuple[tuple[Array, ...], Array]:
    """Prepare what `logits` multiplies keys of a ``kind`` by, and the factor float32 [R] of its result.

    Args:
        ref: queries [..., G, E].
        at: the index before G.
        head: int32 [R], which query head each row is; R is `ROWS` or more.
        kind: dtype of the keys' codes.
    """
    rows, width = head.shape[0], ref.shape[-1]
    # Rows of a product, 16 at least: two digits, or, if there are few, the queries and nothing.
    row = jnp.arange(2 * rows if kind != "float8_e4m3fn" or rows == ROWS else rows, dtype=jnp.int32)
    first, of = (row < rows)[:, None], folded(head, row.shape[0] // rows)

    def largest(head):
        return jnp.max(jnp.abs(ref[*at, head, :].astype(jnp.float32)), axis=1)

    if kind != "float8_e4m3fn":
        most = largest(of)

        def digits(query):
            whole = query.astype(jnp.float32) * jnp.where(most > 0, 127 / most, 0)[:, None]
            digit = jnp.floor(whole + 0.5)
            return jnp.where(first, digit, jnp.floor((whole - digit) * _BASE + 0.5)).astype(jnp.int8)

        if kind == "int8":
            return (digits(ref[*at, of, :]),), largest(head) * (1 / (127 * _BASE))
        halves = (pl.ds(begin, width // 2) for begin in (0, width // 2))
        return tuple(digits(ref[*at, of, half]) for half in halves), largest(head) * (1 / (16 * 127 * _BASE))
    channel = 2 * jnp.arange(width // 2, dtype=jnp.int32)[None, :]
    power = _power(largest(of))
    up = lax.bitcast_convert_type(jnp.int32(254 << 23) - lax.bitcast_convert_type(power, jnp.int32), jnp.float32)

    def half(odd):
        query = ref[*at, of[:, None], channel + odd].astype(jnp.float32) * up[:, None] * 2.0**_FLOAT16_TOP
        return jnp.where(first, query, 0).astype(jnp.float16)

    return (half(0), half(1)), _power(largest(head)) * 2.0**-_FLOAT16_TOP


def _power(x: Array) -> Array:
    # The power of two up to x, a float32 of at least 0.
    return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000, jnp.float32)


def logits(query: tuple[Array, ...], keys: Array, rows: int, kind: str, interpret: bool) -> Array:
    """Multiply a `query_operand` with a block of keys [N, ...], read from a `key_operand`: float32 [R, N]."""
    if kind != "float8_e4m3fn":
        weight = jnp.where(jnp.arange(2 * rows, dtype=jnp.int32) < rows, _BASE, 1)
        parts = (keys,) if kind == "int8" else _int8_keys(keys, interpret)
        products = (plt.dot(x, part, trans_b=True) for x, part in zip(query, parts, strict=True))
        product = functools.reduce(jnp.add, products) * weight[:, None]
        return jnp.sum(product.reshape(2, rows, -1), axis=0, dtype=jnp.int32).astype(jnp.float32)
    halves = _float16_keys(keys, kind, interpret)
    even, odd = (plt.dot(x, half, trans_b=True) for x, half in zip(query, halves, strict=True))
    product = even + odd
    return product if product.shape[0] == rows else jnp.sum(product.reshape(2, rows, -1), axis=0)


def exp2(x: Array, interpret: bool) -> Array:
    """Compute 2^x of float32 at most 0, with results below 2^-126 as 0: one instruction, where ``jnp.exp`` takes seven."""
    return jnp.exp2(x) if interpret else assembly("ex2.approx.ftz.f32 $0, $1;", [x], result=jnp.float32)
