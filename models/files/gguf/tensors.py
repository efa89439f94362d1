"""The tensors of a GGUF file under their names in Hugging Face checkpoints."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import gguf
import numpy as np

from ...sizes.architecture import Architecture
from ..tables.checkpoint import tensor_problems
from ..tables.leaf import AnyLeaf, Index, Parts
from .config import ROPE_FACTORS, architecture
from .families import FACTORS_LONG, FACTORS_SHORT
from .qwen3next import ARCHITECTURE as QWEN3NEXT
from .qwen3next import Piece, is_read, piece
from .reader import GGUFFile
from .stacks import Stack, stacked

_FREQUENCIES = (ROPE_FACTORS, FACTORS_LONG, FACTORS_SHORT)  # which `config` has read
_ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}


@dataclasses.dataclass(frozen=True)
class GGUFTensors:
    """The tensors of a file by their Hugging Face names, read one at a time.

    Attributes:
        file: the open file.
        names: names in the file by names in Hugging Face checkpoints.
        rotated: number of heads of each tensor whose rows llama.cpp re-orders, by Hugging Face name.
        stacks: how other tensors of the file make a tensor of a Hugging Face checkpoint, by its name there.
        offsets: what llama.cpp adds to the norms of a checkpoint, by Hugging Face name.
    """

    file: GGUFFile
    names: Mapping[str, str]
    rotated: Mapping[str, int]
    stacks: Mapping[str, Stack | Piece]
    offsets: Mapping[str, float]

    @classmethod
    def of(cls, file: GGUFFile, config: Architecture, table: Sequence[AnyLeaf]) -> GGUFTensors:
        """Map the tensors that ``table`` asks for to tensors of the file.

        Raises:
            ValueError: tensors are missing, unused or of a wrong shape; the message names all of them.
        """
        arch = architecture(file)
        mapping = gguf.get_tensor_name_map(_ARCHITECTURES[arch], config.num_layers)
        experts = 0 if config.experts is None else config.experts.num_experts
        names, expected, rotated, offsets = {}, {}, {}, {}
        stacks: dict[str, Stack | Piece] = {}
        for leaf in table:
            for index, name in enumerate(leaf.names):
                whole = leaf.file_shape(index)
                stack = piece(file, name, whole, experts, config.linear) if arch == QWEN3NEXT else stacked(name)
                if stack is not None:
                    stacks[name] = stack
                    expected.update(stack.shapes(whole))
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
        used = [name for name in file.tensors if name not in _FREQUENCIES and is_read(file, name, config.num_layers)]
        found = {name: file.tensors[name].shape for name in used}
        problems = tensor_problems(expected, found)
        if problems:
            lines = "\n  ".join(problems)
            raise ValueError(f"{file.path} does not hold the model of its metadata:\n  {lines}")
        return cls(file, names, rotated, stacks, offsets)

    def read(self, name: str, dtype: np.dtype) -> np.ndarray:
        """Read the tensor ``name`` of the Hugging Face checkpoint, in ``dtype``.

        Raises:
            ValueError: the package ``gguf`` cannot decode the tensor's type.
        """
        if name in self.stacks:
            # The logarithm of a decay is rounded once, after it is taken.
            wide = np.dtype(np.float32) if name.endswith(".A_log") else dtype
            made = self.stacks[name].join(lambda each, index: self.file.read(each, wide, index))
            return made.astype(dtype, copy=False)
        if name in self.offsets:
            return (self.file.read(self.names[name], np.dtype(np.float32)) - self.offsets[name]).astype(dtype)
        tensor = self.file.read(self.names[name], dtype)
        heads = self.rotated.get(name)
        return tensor if heads is None else halves(tensor, heads)

    def parts(self, leaf: AnyLeaf, dtype: np.dtype) -> Parts:
        """Return a function that reads parts of a parameter in ``dtype``. Every host decodes the whole parameter first.

        Raises:
            ValueError: the package ``gguf`` cannot decode a tensor's type.
        """
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
