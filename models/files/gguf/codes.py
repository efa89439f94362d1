"""Blocks of a GGUF file as codes, scales and minima, without a second rounding of the numbers.

The layouts of the blocks are from the package ``gguf``, which decodes them to floats. The scale of a group of Q4_K is the
product of two numbers and is rounded to float16, by 1 / 2048 of a scale at most; everything else is exact.
"""

from collections.abc import Callable

import gguf
import jax.numpy as jnp
import numpy as np

from pallas_kernels.formats.coded_matrix import CHUNK, CodedMatrix, packed

from ..coded import coded
from ..tables.leaf import Leaf
from .tensors import GGUFTensors, halves

_Types = gguf.GGMLQuantizationType
_HALF = np.dtype("<f2")
Read = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray | None]]


def coder(tensors: GGUFTensors, weight_dtype: str) -> Callable[[Leaf], CodedMatrix]:
    """Return a function that makes the codes of a parameter: the file's own if they can be kept, else of its numbers."""

    def make(leaf: Leaf) -> CodedMatrix:
        codes = kept(tensors, leaf, weight_dtype)
        if codes is not None:
            return codes
        numbers = leaf.join([tensors.read(name, np.dtype(np.float32)) for name in leaf.names])
        # The file spends 5 bits or more, but no whole floats, on a tensor.
        many = any(tensors.file.tensors[tensors.names[name]].kind in _MANY for name in leaf.names)
        return coded(leaf.path, numbers, "int8" if many else weight_dtype)

    return make


def kept(tensors: GGUFTensors, leaf: Leaf, weight_dtype: str) -> CodedMatrix | None:
    """Return a parameter as the file's own codes; None if its tensors have other types, or several types.

    Args:
        tensors: the file's.
        leaf: a kernel or a table.
        weight_dtype: "int8" keeps Q8_0; "int4" keeps Q8_0, Q4_0, Q4_1 and Q4_K.
    """
    kinds = {tensors.file.tensors[tensors.names[name]].kind for name in leaf.names}
    width = leaf.folds[0][-1]
    if len(kinds) > 1 or width % CHUNK or leaf.stack:
        return None
    (kind,) = kinds
    if kind not in _READ or (weight_dtype == "int8" and kind != _Types.Q8_0):
        return None
    each = [_parts(tensors, name, _READ[kind]) for name in leaf.names]
    codes, scales = [part[0] for part in each], [part[1] for part in each]
    minima = [part[2] for part in each if part[2] is not None]  # all tensors are of one type: all have them, or none
    return CodedMatrix(
        codes=jnp.asarray(leaf.rows(codes)),
        scales=jnp.asarray(leaf.rows(scales)),
        minima=jnp.asarray(leaf.rows(minima)) if minima else None,
    )


def _parts(tensors: GGUFTensors, name: str, read: Read) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    tensor = tensors.file.tensors[tensors.names[name]]
    rows = tensor.shape[0]
    block, size = gguf.GGML_QUANT_SIZES[tensor.kind]
    blocks = np.asarray(tensors.file.data[tensor.begin : tensor.begin + tensor.size]).reshape(-1, size)
    heads = tensors.rotated.get(name)

    def own(part: np.ndarray) -> np.ndarray:
        part = part.reshape(rows, -1)
        return part if heads is None else halves(part, heads)

    codes, scales, minima = read(blocks)
    return own(codes), own(scales), None if minima is None else own(minima)


def _scales(blocks: np.ndarray, at: int = 0) -> np.ndarray:
    return blocks[:, at : at + 2].copy().view(_HALF).astype(np.float16)


def _q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, None]:
    # A scale, and 32 codes.
    return blocks[:, 2:].view(np.int8), _scales(blocks), None


def _nibbles(blocks: np.ndarray) -> np.ndarray:
    # Of 32 numbers: byte j holds j in its low bits and 16 + j in its high bits.
    return packed(np.concatenate([blocks & 15, blocks >> 4], axis=1).reshape(-1, CHUNK))


def _q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # A scale, and codes whose zero is 8.
    scales = _scales(blocks)
    return _nibbles(blocks[:, 2:]), scales, (scales * np.float16(-8)).astype(np.float16)


def _q4_1(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # A scale, a minimum, and codes.
    return _nibbles(blocks[:, 4:]), _scales(blocks), _scales(blocks, 2)


def _q4_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # Of 256 numbers: two factors; 8 scales and 8 minima of 6 bits in 12 bytes; four chunks of codes in
    # the order of a `CodedMatrix`.
    factor, least = (_scales(blocks, at).astype(np.float32) for at in (0, 2))
    scale, minimum = gguf.quants.Q4_K.get_scale_min(blocks[:, 4:16])
    return (
        blocks[:, 16:],
        (factor * scale.reshape(len(blocks), -1)).astype(np.float16),
        (-least * minimum.reshape(len(blocks), -1)).astype(np.float16),
    )


_READ: dict[gguf.GGMLQuantizationType, Read] = {
    _Types.Q8_0: _q8_0, _Types.Q4_0: _q4_0, _Types.Q4_1: _q4_1, _Types.Q4_K: _q4_k,
}  # fmt: skip
_MANY = (_Types.Q5_0, _Types.Q5_1, _Types.Q5_K, _Types.Q6_K, _Types.Q8_0, _Types.Q8_1, _Types.Q8_K)
