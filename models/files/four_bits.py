"""Experts in 4 bits in a safetensors file (MXFP4), as gpt-oss is published: they are decoded when they are read.

A tensor NAME [E, in, out] is stored as NAME_blocks uint8 [E, out, in / 32, 16] and NAME_scales uint8 [E, out, in / 32].
A byte has two numbers, the first in its low half. A number is a sign, two bits of exponent and one of mantissa, times 2 to
the power of the scale of its block of 32, less 127. Every such number is a bfloat16.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 and 5.4.1; the layout as in transformers 5.24.
"""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

BLOCKS, SCALES = "_blocks", "_scales"
_BLOCK = 32  # numbers that share a scale
_HALF = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_NUMBERS = np.concatenate([_HALF, -_HALF])
_BIAS = 127


def whole_shape(name: str, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> tuple[int, ...] | None:
    """Return the shape [E, in, out] of the tensor ``name`` whose blocks and scales are in a file; None if they do not fit."""
    blocks, scales = shapes.get(name + BLOCKS, ()), shapes.get(name + SCALES, ())
    kinds = {dtypes.get(name + BLOCKS), dtypes.get(name + SCALES)}
    if len(blocks) != 4 or blocks[3] != _BLOCK // 2 or scales != blocks[:3] or kinds != {"U8"}:
        return None
    return (blocks[0], blocks[2] * _BLOCK, blocks[1])


def numbers(blocks: Any, scales: Any, index: tuple[slice, slice, slice]) -> np.ndarray:
    """Decode a part of a tensor, expert by expert.

    Args:
        blocks: uint8 [E, out, in / 32, 16], an array or a slice of an opened file.
        scales: uint8 [E, out, in / 32], like ``blocks``.
        index: the part of [E, in, out].

    Returns:
        bfloat16, the part.
    """
    count, _, columns, _ = getattr(blocks, "get_shape", lambda: blocks.shape)()
    experts, inner, outer = index
    start, stop, _ = inner.indices(columns * _BLOCK)
    first, last = start // _BLOCK, -(-stop // _BLOCK)
    matrices = []
    for expert in range(count)[experts]:
        at = (slice(expert, expert + 1), outer, slice(first, last))
        codes, power = np.asarray(blocks[at])[0], np.asarray(scales[at])[0]
        halves = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*power.shape, _BLOCK)
        values = np.ldexp(_NUMBERS[halves], (power.astype(np.int32) - _BIAS)[..., None])
        flat = values.reshape(len(values), -1)[:, start - first * _BLOCK : stop - first * _BLOCK]
        matrices.append(flat.T.astype(ml_dtypes.bfloat16))
    return np.stack(matrices)
