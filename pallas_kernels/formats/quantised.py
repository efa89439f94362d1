"""Quantised keys and values: codes of 8 or 4 bits, and one scale or four for each token and KV head.

A vector x of D numbers is stored as ``codes`` and a ``scale`` with x about ``codes * scale``: int8 codes go from -127 to 127,
float8_e4m3fn codes from -448 to 448, the largest number of that format, and int4 codes from -7 to 7. The scale is the largest
size in the vector divided by the largest code, so nothing is clipped, however large it is. A scale is rounded up to bfloat16
before the vector is divided by it, so dequantisation multiplies by exactly the same scale.

Two int4 codes share a byte of an int8 array: channel i has the four low bits, channel i + D/2 the four high bits.

A vector may have a scale for each of four groups of channels instead: the even and the odd channels of the first half, then
of the second half. A number is then its code times the scale of its group. These groups are what a GPU's kernels have apart
anyway: 16 bits of int4 codes are two neighbouring channels of either half.

A vector may be mixed before it is rounded (`pallas_kernels.formats.mixing`): each channel becomes a sum of all channels with
signs, which is a rotation. Then one large channel no longer decides the steps of all other channels. Dequantisation mixes
again, which undoes it.

An operation that reads codes need not dequantise them: ``q . x = (q . codes) * scale``, and the sum of p * x is the sum of
``(p * scale) * codes``. Codes of all kinds are exact in bfloat16, so products with codes are as exact as products with the
model's own keys and values. Sums are in float32. If the codes are mixed, the query is mixed too, and so is what comes out
(`mixed_problem`). On a GPU, decode attention over all slots of int8 keys rounds the query instead, to 16 bits of its largest
value (`pallas_kernels._triton.code_products`): then sums are exact.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.formats.mixing import mix, mix_few
from pallas_kernels.host import take_rows

MOST = {"int8": 127.0, "float8_e4m3fn": 448.0, "int4": 7.0}  # the largest code of each kind
GROUPS = 4  # groups of channels that can have a scale each
_LEAST = 2.0**-120  # a scale below it counts as 0, so that its inverse is finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantised:
    """A quantised array [..., D]; an operation takes one where its docstring says so.

    Attributes:
        codes: int8 or float8_e4m3fn [..., D]; or int8 [..., D / 2] with two int4 codes in each byte.
        scale: bfloat16 [...], or [..., 4] with a scale for each of the `GROUPS`. In an offloaded cache
            (`pallas_kernels.host.Rows`) the codes are the copies on the device, and the scales cover all slots.
        of: the dtype of the array before quantisation.
        packed: whether the codes are int4.
        mixed: whether the array was mixed before it was rounded.
    """

    codes: Array
    scale: Array
    of: str = dataclasses.field(metadata={"static": True})
    packed: bool = dataclasses.field(default=False, metadata={"static": True})
    mixed: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the dequantised array; the codes have another dtype, `kind`."""
        return jnp.dtype(self.of)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantised array, [..., D]."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * (2 if self.packed else 1))

    @property
    def ndim(self) -> int:
        """The number of axes of `shape`."""
        return self.codes.ndim

    @property
    def kind(self) -> str:
        """The kind of the codes, a key of `MOST`."""
        return "int4" if self.packed else str(self.codes.dtype)

    @property
    def grouped(self) -> bool:
        """Whether each of the `GROUPS` has a scale."""
        return self.scale.ndim == self.codes.ndim

    @property
    def name(self) -> str:
        """The kind in words, for messages."""
        return f"{'grouped ' * self.grouped}{'mixed ' * self.mixed}{self.kind}"


def quantise(x: Array, kind: str, mixed: bool = False, grouped: bool = False) -> Quantised:
    """Quantise ``x`` [..., D]; ``kind`` is a key of `MOST`. A vector, or a group, with a NaN dequantises to NaN.

    With ``grouped`` each of the `GROUPS` gets a scale, if D is a multiple of 4.
    """
    wide = _rounded_next(x.astype(jnp.float32))
    wide = mix(wide) if mixed else wide
    grouped = grouped and can_group(x.shape[-1])
    most = jnp.max(jnp.abs(_in_groups(wide) if grouped else wide), axis=-2 if grouped else -1)
    scale = scale_of(most.reshape(*x.shape[:-1], GROUPS) if grouped else most, kind)
    codes, packed = codes_of(wide, _of_channels(scale, x.shape[-1]) if grouped else scale[..., None], kind), kind == "int4"
    return Quantised(
        codes=pack(*jnp.split(codes, 2, axis=-1)) if packed else codes,
        scale=scale.astype(jnp.bfloat16),
        of=str(x.dtype),
        packed=packed,
        mixed=mixed,
    )


@jax.custom_jvp
def _rounded_next(x: Array) -> Array:
    """Return ``x``, which is rounded next: a derivative of codes would be 0 without a word, or have 8 bits."""
    return x


@_rounded_next.defjvp
def _refuse(*_: Any) -> Any:
    raise NotImplementedError(
        "keys and values that are stored as codes have no derivative: differentiate with kv_dtype=None, got a cache in 8 or "
        "4 bits"
    )


def dequantise(x: Quantised) -> Array:
    """Dequantise ``x``: [..., D] in the dtype from before quantisation."""
    codes = jnp.concatenate(unpack(x.codes), axis=-1) if x.packed else x.codes
    scale = x.scale.astype(jnp.float32)
    wide = codes.astype(jnp.float32) * (_of_channels(scale, codes.shape[-1]) if x.grouped else scale[..., None])
    return (mix(wide) if x.mixed else wide).astype(x.dtype)


def can_group(dim: int) -> bool:
    """Tell whether vectors of ``dim`` channels have the `GROUPS`: halves with as many even as odd channels."""
    return dim % GROUPS == 0


def group_of(channel: Array, dim: int) -> Array:
    """Tell which of the `GROUPS` each ``channel`` int32 of ``dim`` is in, int32."""
    return 2 * (channel >= dim // 2).astype(jnp.int32) + (channel & 1)


def _in_groups(x: Array) -> Array:
    # [..., D] as halves, pairs of neighbours, and the channels of a pair: [..., 2, D / 4, 2].
    return x.reshape(*x.shape[:-1], 2, x.shape[-1] // GROUPS, 2)


def _of_channels(scale: Array, dim: int) -> Array:
    """Give each of ``dim`` channels the scale of its group, from scales [..., 4]: [..., D]."""
    lead = scale.shape[:-1]
    halves = jnp.broadcast_to(scale.reshape(*lead, 2, 1, 2), (*lead, 2, dim // GROUPS, 2))
    return halves.reshape(*lead, dim)


def pack(low: Array, high: Array) -> Array:
    """Put two arrays of int4 codes, int8 of one shape, into one int8 array of that shape."""
    return (low & 15) | (high << 4)


def unpack(codes: Array) -> tuple[Array, Array]:
    """Undo `pack`."""
    return (codes << 4) >> 4, codes >> 4


def whole(x: Array | Quantised) -> Array:
    """Dequantise ``x`` if it is quantised."""
    return dequantise(x) if isinstance(x, Quantised) else x


def stored_like(x: Array, store: Array | Quantised) -> Array | Quantised:
    """Convert ``x`` [..., D] to the form that ``store`` has: quantise it if ``store`` is quantised."""
    return quantise(x, store.kind, store.mixed, store.grouped) if isinstance(store, Quantised) else x


def vectors(x: Array | Quantised) -> Array:
    """Return the array with the axis D, or D / 2 if it is packed: the codes, or ``x`` itself."""
    return x.codes if isinstance(x, Quantised) else x


def with_vectors(x: Array | Quantised, new: Array) -> Array | Quantised:
    """Join ``new`` codes with the scales of ``x``; return ``new`` itself if ``x`` is not quantised."""
    return dataclasses.replace(x, codes=new) if isinstance(x, Quantised) else new


def numbers(x: Array | Quantised, taken: Array, slots: Array) -> Array:
    """Dequantise ``taken`` [B, H, K, ...], the `vectors` of ``x`` at ``slots`` int32 [B, H or 1, K]: [B, H, K, D]."""
    if not isinstance(x, Quantised):
        return taken
    scale = take_rows(x.scale, slots) if x.grouped else take_rows(x.scale[..., None], slots)[..., 0]
    return dequantise(dataclasses.replace(x, codes=taken, scale=scale))


def numbers_at(x: Array | Quantised, slots: Array) -> Array:
    """Take ``slots`` int32 [B, H or 1, K] of ``x`` [B, H, S, D], in either memory, and dequantise them: [B, H, K, D]."""
    return numbers(x, take_rows(vectors(x), slots), slots)


def zeros(shape: tuple[int, ...], dtype: str, kind: str, mixed: bool = False, grouped: bool = False) -> Quantised:
    """Make the codes of zeros [..., D], as `quantise` does."""
    groups = (GROUPS,) * (grouped and can_group(shape[-1]))
    return Quantised(
        codes=jnp.zeros((*shape[:-1], code_bytes(shape[-1], kind)), "int8" if kind == "int4" else kind),
        scale=jnp.zeros((*shape[:-1], *groups), jnp.bfloat16),
        of=dtype,
        packed=kind == "int4",
        mixed=mixed,
    )


def code_bytes(dim: int, kind: str) -> int:
    """Count the bytes of the codes of a vector of ``dim`` numbers."""
    return dim // 2 if kind == "int4" else dim


def vector_bytes(x: Array | Quantised) -> int:
    """Count the bytes of one vector of ``x`` [..., D]: of its numbers, or of its codes and its scale."""
    codes = vectors(x).shape[-1] * vectors(x).dtype.itemsize
    return codes + scale_bytes(x.shape[-1], x.grouped) if isinstance(x, Quantised) else codes


def scale_bytes(dim: int, grouped: bool) -> int:
    """Count the bytes of the scales of a vector of ``dim`` numbers."""
    return jnp.dtype(jnp.bfloat16).itemsize * (GROUPS if grouped and can_group(dim) else 1)


def mixed_problem(
    query: Array, key: Array | Quantised, value: Array | Quantised, as_stored: bool = True
) -> tuple[Array, Array | Quantised, Array | Quantised, Callable[[Array], Array]]:
    """Change an attention's operands so that no code needs to be mixed back.

    Args:
        query: [..., D].
        key: keys or codes. If they are mixed, the query is mixed instead: a rotation of both changes no logit.
        value: values or codes. If they are mixed, the output is mixed instead.
        as_stored: False if keys are rotated when they are read: then mixed keys stay as they are.

    Returns:
        The operands, and a function that brings an output [..., D] into the space of the values, or back.
    """
    if isinstance(key, Quantised) and key.mixed and as_stored:
        query, key = mix_few(query), dataclasses.replace(key, mixed=False)
    if isinstance(value, Quantised) and value.mixed:
        return query, key, dataclasses.replace(value, mixed=False), mix_few
    return query, key, value, lambda x: x


def scale_of(largest: Array, kind: str) -> Array:
    """Compute the scale of vectors whose largest size is ``largest`` float32: float32 of its shape, exact in bfloat16."""
    bits = lax.bitcast_convert_type(largest * (1 / MOST[kind]), jnp.int32)
    # Cut by hand: a compiler may leave out a conversion to bfloat16 and back.
    scale = lax.bitcast_convert_type((bits + 0xFFFF) & ~0xFFFF, jnp.float32)
    return jnp.where(largest < jnp.inf, jnp.where(scale < _LEAST, 0.0, scale), largest)


def codes_of(x: Array, scale: Array, kind: str) -> Array:
    """Round ``x`` float32 to codes under a ``scale`` from `scale_of` that broadcasts against it; int4 codes not packed."""
    codes = x * jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1.0), 0.0)
    return codes.astype(kind) if kind == "float8_e4m3fn" else jnp.floor(codes + 0.5).astype(jnp.int8)
