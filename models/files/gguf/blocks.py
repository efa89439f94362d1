"""Blocks of a GGUF file decoded by a compiled program, on the device that keeps the parameter.

NumPy decodes them in many steps, each of which waits for Python's lock. The layouts are those of the package ``gguf``. A
product of its scales and codes has at most 24 bits, so it is exact in float32, and the results have the same bits.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import gguf
import jax
import jax.numpy as jnp
from jax import Array

from ..tables.leaf import AnyLeaf, Leaf
from .tensors import GGUFTensors, halves

LEAST = 1 << 20  # bytes of a parameter for which a program is compiled
_Types = gguf.GGMLQuantizationType


def decoded(tensors: GGUFTensors, leaf: AnyLeaf, dtype: str) -> Array | None:
    """Decode a parameter in ``dtype``; None for small ones, and for those that NumPy has to decode."""
    if not isinstance(leaf, Leaf) or leaf.gated or not all(name in tensors.names for name in leaf.names):
        return None
    each = [tensors.file.tensors[tensors.names[name]] for name in leaf.names]
    if any(x.kind not in DECODE for x in each) or sum(x.size for x in each) < LEAST or leaf.offset:
        return None
    blocks = [tensors.file.data[x.begin : x.begin + x.size].reshape(x.shape[0], -1) for x in each]
    known = {name: str(at) for at, name in enumerate(leaf.names)}  # layers have the same program
    recipe = dataclasses.replace(leaf, path=leaf.path.rpartition("/")[2], names=tuple(known[x] for x in leaf.names))
    heads = tuple(tensors.rotated.get(name) for name in leaf.names)
    return joined(blocks, recipe=recipe, kinds=tuple(x.kind for x in each), heads=heads, dtype=dtype)


@functools.partial(jax.jit, static_argnames=("recipe", "kinds", "heads", "dtype"))
def joined(blocks: list[Array], *, recipe: Leaf, kinds: tuple, heads: tuple, dtype: str) -> Array:
    """Decode tensors, uint8 [rows, bytes], and join them."""
    parts: list[Any] = []  # `halves` and `Leaf.join` take arrays of both kinds
    for rows, kind, count in zip(blocks, kinds, heads, strict=True):
        numbers: Any = DECODE[kind](rows.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])).astype(dtype).reshape(len(rows), -1)
        parts.append(numbers if count is None else halves(numbers, count))
    return cast("Array", recipe.join(parts))


def _scale(blocks: Array, at: int) -> Array:
    return jax.lax.bitcast_convert_type(blocks[:, at : at + 2], jnp.float16).astype(jnp.float32)[:, None, None]


def _bits(codes: Array, run: int, width: int) -> Array:
    """Take the numbers of ``width`` bits out of runs of bytes, uint8 [N, X]: the lowest of all bytes of a run first."""
    shifts = jnp.arange(0, 8, width, dtype=jnp.uint8).reshape(1, 1, -1, 1)
    return ((codes.reshape(len(codes), -1, 1, run) >> shifts) & ((1 << width) - 1)).reshape(len(codes), -1, 32)


def _scaled(blocks: Array, codes: Array) -> Array:
    """Multiply codes [N, 8, 32] by the scales of Q4_K and Q5_K, and subtract the minima."""
    low, high, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = jnp.concatenate([low & 63, (both & 15) | ((low >> 2) & 48)], 1)[:, :, None].astype(jnp.float32)
    least = jnp.concatenate([high & 63, (both >> 4) | ((high >> 2) & 48)], 1)[:, :, None].astype(jnp.float32)
    return _scale(blocks, 0) * scale * codes.astype(jnp.float32) - _scale(blocks, 2) * least


def _q4_k(blocks: Array) -> Array:
    return _scaled(blocks, _bits(blocks[:, 16:], 32, 4))


def _q5_k(blocks: Array) -> Array:
    return _scaled(blocks, _bits(blocks[:, 48:], 32, 4) | (_bits(blocks[:, 16:48], 32, 1) << 4))


def _q6_k(blocks: Array) -> Array:
    codes = _bits(blocks[:, :128], 64, 4) | (_bits(blocks[:, 128:192], 32, 2) << 4)
    scale = jax.lax.bitcast_convert_type(blocks[:, 192:208], jnp.int8)[:, :, None].astype(jnp.float32)
    return _scale(blocks, 208) * scale * (codes.astype(jnp.float32) - 32).reshape(len(blocks), 16, 16)


def _q8_0(blocks: Array) -> Array:
    return _scale(blocks, 0) * jax.lax.bitcast_convert_type(blocks[:, None, 2:], jnp.int8).astype(jnp.float32)


DECODE: dict[_Types, Callable[[Array], Array]] = {
    _Types.Q4_K: _q4_k, _Types.Q5_K: _q5_k, _Types.Q6_K: _q6_k, _Types.Q8_0: _q8_0,
}  # fmt: skip
