"""Quantised keys and values: codes of 8 bits, and a scale for each token and KV head.

A vector x of D numbers is stored as ``codes`` and a ``scale`` with x about ``codes * scale``: int8 codes go from -127 to 127,
float8_e4m3fn codes from -448 to 448, the largest number of that format. The scale is the largest size in the vector divided
by the largest code, so nothing is clipped, however large it is. A scale is rounded up to bfloat16 before the vector is
divided by it, so dequantisation multiplies by exactly the same scale.

An operation that reads codes need not dequantise them: ``q . x = (q . codes) * scale``, and the sum of p * x is the sum of
``(p * scale) * codes``. Codes of both kinds are exact in bfloat16, so products with codes are as exact as products with the
model's own keys and values. Sums are in float32. On a GPU, decode attention over all slots of int8 keys rounds the query
instead, to 16 bits of its largest value (`pallas_kernels._triton.code_products`): then sums are exact.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.host import take_rows

MOST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # the largest code of each kind
_LEAST = 2.0**-120  # a scale below it counts as 0, so that its inverse is finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantised:
    """A quantised array [..., D]; an operation takes one where its docstring says so.

    Attributes:
        codes: int8 or float8_e4m3fn [..., D].
        scale: bfloat16 [...]. In an offloaded cache (`pallas_kernels.host.Rows`) the codes are the copies on the device, and
            the scales cover all slots.
        of: the dtype of the array before quantisation.
    """

    codes: Array
    scale: Array
    of: str = dataclasses.field(metadata={"static": True})

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the dequantised array; the codes have another dtype, `kind`."""
        return jnp.dtype(self.of)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantised array, [..., D]."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """The number of axes of `shape`."""
        return self.codes.ndim

    @property
    def kind(self) -> str:
        """The dtype of the codes, a key of `MOST`."""
        return str(self.codes.dtype)


def quantise(x: Array, kind: str) -> Quantised:
    """Quantise ``x`` [..., D]; ``kind`` is "int8" or "float8_e4m3fn". A vector with a NaN dequantises to NaN."""
    wide = x.astype(jnp.float32)
    scale = scale_of(jnp.max(jnp.abs(wide), axis=-1), kind)
    return Quantised(
        codes=codes_of(wide, scale[..., None], kind), scale=scale.astype(jnp.bfloat16), of=str(x.dtype)
    )


def dequantise(x: Quantised) -> Array:
    """Dequantise ``x``: [..., D] in the dtype from before quantisation."""
    return (x.codes.astype(jnp.float32) * x.scale.astype(jnp.float32)[..., None]).astype(x.dtype)


def whole(x: Array | Quantised) -> Array:
    """Dequantise ``x`` if it is quantised."""
    return dequantise(x) if isinstance(x, Quantised) else x


def stored_like(x: Array, store: Array | Quantised) -> Array | Quantised:
    """Convert ``x`` [..., D] to the form that ``store`` has: quantise it if ``store`` is quantised."""
    return quantise(x, store.kind) if isinstance(store, Quantised) else x


def vectors(x: Array | Quantised) -> Array:
    """Return the array with the axis D: the codes, or ``x`` itself."""
    return x.codes if isinstance(x, Quantised) else x


def with_vectors(x: Array | Quantised, new: Array) -> Array | Quantised:
    """Join ``new`` codes with the scales of ``x``; return ``new`` itself if ``x`` is not quantised."""
    return dataclasses.replace(x, codes=new) if isinstance(x, Quantised) else new


def numbers(x: Array | Quantised, taken: Array, slots: Array) -> Array:
    """Dequantise ``taken`` [B, H, K, D], the `vectors` of ``x`` at ``slots`` int32 [B, H or 1, K]: [B, H, K, D]."""
    if not isinstance(x, Quantised):
        return taken
    scale = take_rows(x.scale[..., None], slots)[..., 0]
    return dequantise(Quantised(codes=taken, scale=scale, of=x.of))


def numbers_at(x: Array | Quantised, slots: Array) -> Array:
    """Take ``slots`` int32 [B, H or 1, K] of ``x`` [B, H, S, D], in either memory, and dequantise them: [B, H, K, D]."""
    return numbers(x, take_rows(vectors(x), slots), slots)


def zeros(shape: tuple[int, ...], dtype: str, kind: str) -> Quantised:
    """Make the codes of zeros [..., D]."""
    return Quantised(codes=jnp.zeros(shape, kind), scale=jnp.zeros(shape[:-1], jnp.bfloat16), of=dtype)


def scale_of(largest: Array, kind: str) -> Array:
    """Compute the scale of vectors whose largest size is ``largest`` float32: float32 of its shape, exact in bfloat16."""
    bits = lax.bitcast_convert_type(largest * (1 / MOST[kind]), jnp.int32)
    # Cut by hand: a compiler may leave out a conversion to bfloat16 and back.
    scale = lax.bitcast_convert_type((bits + 0xFFFF) & ~0xFFFF, jnp.float32)
    return jnp.where(largest < jnp.inf, jnp.where(scale < _LEAST, 0.0, scale), largest)


def codes_of(x: Array, scale: Array, kind: str) -> Array:
    """Round ``x`` float32 to codes under a ``scale`` from `scale_of` that broadcasts against it."""
    codes = x * jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1.0), 0.0)
    return (jnp.floor(codes + 0.5) if kind == "int8" else codes).astype(kind)
