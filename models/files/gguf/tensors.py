"""The tensors of a GGUF file under their names in Hugging Face checkpoints."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import gguf
import numpy as np

from ...sizes.architecture import Architecture
from ..tables.checkpoint import tensor_problems
from ..tables.leaf import AnyLeaf, Index, Parts
from .config import architecture, predicting
from .families import FACTORS_LONG, FACTORS_SHORT, ROPE_FACTORS
from .pieces import Piece, piece
from .reader import GGUFFile

_BLOCK = re.compile(r"blk\.(\d+)\..*")
_FREQUENCIES = (ROPE_FACTORS, FACTORS_LONG, FACTORS_SHORT)  # which `config` has read
_ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


@dataclasses.dataclass(frozen=True)
class GGUFTensors:
    """The tensors of a file by their Hugging Face names, read one at a time.

    Attributes:
        file: the open file.
        names: names in the file by names in Hugging Face checkpoints.
        rotated: number of heads of each tensor whose rows llama.cpp re-orders, by Hugging Face name.
        pieces: how other tensors of the file make a tensor of a Hugging Face checkpoint, by its name there.
        offsets: what llama.cpp adds to the norms of a checkpoint, by Hugging Face name.
    """

    file: GGUFFile
    names: Mapping[str, str]
    rotated: Mapping[str, int]
    pieces: Mapping[str, Piece]
    offsets: Mapping[str, float]

    @classmethod
    def of(cls, file: GGUFFile, config: Architecture, table: Sequence[AnyLeaf]) -> GGUFTensors:
        """Map the tensors that ``table`` asks for to tensors of the file."""
        arch = architecture(file)
        mapping = gguf.get_tensor_name_map(_ARCHITECTURES[arch], config.num_layers)
        names, expected, rotated, offsets = {}, {}, {}, {}
        pieces: dict[str, Piece] = {}
        for leaf in table:
            for index, name in enumerate(leaf.names):
                whole = leaf.file_shape(index)
                if (form := piece(file, name, whole, config)) is not None:
                    pieces[name] = form
                    expected.update(form.shapes)
                    continue
                found_name = mapping.get_name(name, try_suffixes=(".weight", ".bias"))
                names[name] = f"{found_name}.weight" if name.endswith(".sinks") else found_name
                expected[names[name]] = whole
                if leaf.offset:
                    offsets[name] = leaf.offset
                if arch == "llama" and ".q_proj." in name:
                    rotated[name] = config.num_q_heads
                if arch == "llama" and ".k_proj." in name:
                    rotated[name] = config.num_kv_heads
        unread = range(config.num_layers, config.num_layers + predicting(file))
        blocks = {name: _BLOCK.fullmatch(name) for name in file.tensors if name not in _FREQUENCIES}
        codes = {other for name in blocks for other in file.beside(name)}
        used = [x for x, block in blocks.items() if x not in codes and (block is None or int(block[1]) not in unread)]
        shapes = {name: file.tensors[name].shape for name in used}
        problems = tensor_problems(expected, shapes)
        if problems:
            lines = "\n  ".join(problems)
            raise ValueError(f"{file.path} does not hold the model of its metadata:\n  {lines}")
        return cls(file, names, rotated, pieces, offsets)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Read the tensor ``name`` of the Hugging Face checkpoint, in ``dtype``."""
        if name in self.pieces:
            # The logarithm of a decay is rounded once, after it is taken.
            wide = np.dtype(np.float32) if name.endswith(".A_log") else dtype
            joined = self.pieces[name].join(lambda each, index: self.file.read(each, wide, index))
            return joined.astype(dtype, copy=False)
        if name in self.offsets:
            return (self.file.read(self.names[name], np.dtype(np.float32)) - self.offsets[name]).astype(dtype)
        tensor = self.file.read(self.names[name], dtype)
        heads = self.rotated.get(name)
        return tensor if heads is None else halves(tensor, heads)

    def parts(self, leaf: AnyLeaf, dtype: np.dtype) -> Parts:
        """Return a function that reads parts of a parameter in ``dtype``. Every host decodes the whole parameter first."""
        whole = leaf.join([self.read(name, dtype) for name in leaf.names])

        def read(index: Index) -> np.ndarray:
            return np.ascontiguousarray(whole[index])

        return read


def halves(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Permute the rows of each head of a query or key projection into the order of Hugging Face checkpoints.

    RoPE rotates pairs of channels. In files of the architecture llama the two channels of a pair are neighbours; in Hugging
    Face checkpoints they are half a head apart.

    Args:
        tensor: [heads * D, ...].
        heads: number of heads.
    """
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
