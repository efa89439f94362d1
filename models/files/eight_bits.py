"""Matrices in 8 bits in a safetensors file, as the model and the adapter that ship are stored: half the size of bfloat16.

A matrix NAME [..., R, C] is int8. Beside it NAME_scale [..., R, N] has a float16 scale for each block of C / N numbers of a
row; a number is its int8 times the scale of its block, as in Q8_0 of GGUF (blocks of 32). Vectors stay as they are.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save

SCALE = "_scale"  # end of a scales' name
BLOCK = 64  # numbers that share a scale
_LARGEST = 127
_SCALES = ("F32", "F16", "BF16")


def pack(tensors: Mapping[str, np.ndarray], block: int = BLOCK) -> dict[str, np.ndarray]:
    """Round matrices to 8 bits, each number to the nearest multiple of its block's scale.

    Args:
        tensors: float arrays by name. Arrays of fewer than two dimensions, and matrices whose rows no number of whole blocks
            fills, are returned as they are.
        block: numbers that share a scale.

    Returns:
        Arrays by name: int8 matrices and their scales, and the other arrays.
    """
    packed: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if tensor.ndim < 2 or tensor.shape[-1] % block:
            packed[name] = tensor
            continue
        blocks = np.asarray(tensor, np.float32).reshape(*tensor.shape[:-1], -1, block)
        scale = (np.abs(blocks).max(axis=-1) / _LARGEST).astype(np.float16)
        steps = np.where(scale > 0, scale, 1).astype(np.float32)[..., None]  # a block of zeros stays zeros
        packed[name] = np.clip(np.rint(blocks / steps), -_LARGEST, _LARGEST).astype(np.int8).reshape(tensor.shape)
        packed[name + SCALE] = scale
    return packed


def pack_file(source: str | os.PathLike[str], target: str | os.PathLike[str], block: int = BLOCK) -> None:
    """Write the tensors of a safetensors file in 8 bits; see `pack`."""
    pathlib.Path(target).write_bytes(save(pack(load_file(source), block), metadata={"format": "pt"}))


def numbers(opened: Any, name: str, index: tuple[slice, ...]) -> np.ndarray:
    """Read a part of a tensor of an opened safetensors file: in the file's dtype, or float32 from 8 bits."""
    whole = opened.get_slice(name)
    part = whole[index]
    if whole.get_dtype() != "I8":
        return part
    scales = opened.get_slice(name + SCALE)
    size = whole.get_shape()[-1] // scales.get_shape()[-1]
    wide = np.repeat(scales[(*index[:-1], slice(None))].astype(np.float32), size, axis=-1)
    return part.astype(np.float32) * wide[..., index[-1]]


def problem(opened: Any, name: str) -> str:
    """Say what is wrong with the scales of a tensor in 8 bits; "" for nothing."""
    shape = tuple(opened.get_slice(name).get_shape())
    if name + SCALE not in opened.keys():
        return f"wrong dtype {name}: got I8 without the scales {name}{SCALE}, expected scales or one of {', '.join(_SCALES)}"
    scales = opened.get_slice(name + SCALE)
    scale_shape, dtype = tuple(scales.get_shape()), scales.get_dtype()
    blocks = scale_shape[-1] if scale_shape else 0
    fits = len(shape) > 1 and scale_shape[:-1] == shape[:-1] and blocks > 0 and shape[-1] % blocks == 0
    if not fits or dtype not in _SCALES:
        expected = f"one of {', '.join(_SCALES)} for each block of a row"
        return f"wrong scales {name}{SCALE}: got {dtype} {scale_shape} for a tensor {shape}, expected {expected}"
    return ""
