"""The tensors of a GGUF file under their names in Hugging Face checkpoints.

A file has some of them in another form:

* Experts are stacked there, every matrix [E, out, in]. Of gpt-oss gate and up are tensors of their own.
* Of a layer of linear attention (Qwen3-Next) the file has the projections without groups: all queries, all keys and all
  values in one tensor, and the output gates in another. It has the decay as -exp(A_log), and the convolution without its
  axis of one. Older files have the projections in one tensor, in the checkpoint's order. Value heads stay beside the key
  head that they share; llama.cpp re-orders them in other architectures only.

Sources: llama.cpp's ``conversion/qwen.py`` (``Qwen3NextModel``), which writes the files, and ``src/models/qwen3next.cpp``,
which reads them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence

import gguf
import numpy as np

from ...sizes.architecture import Architecture
from ...sizes.linear import LinearLayers
from ..tables.checkpoint import tensor_problems
from ..tables.leaf import AnyLeaf, Index, Parts
from .config import architecture, predicting
from .families import FACTORS_LONG, FACTORS_SHORT, ROPE_FACTORS
from .reader import GGUFFile

_BLOCK = re.compile(r"blk\.(\d+)\..*")
_FREQUENCIES = (ROPE_FACTORS, FACTORS_LONG, FACTORS_SHORT)  # which `config` has read
_ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
# Reads a tensor of the file by its name; or, with a number, one matrix of a stack of matrices.
Read = Callable[[str, int | None], np.ndarray]
_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
_STACK = re.compile(r"mlp\.experts\.(gate_up|down)_proj(_bias)?")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_RESHAPED = {  # whose axes of one the file may leave out
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """How tensors of the file make one tensor of a checkpoint.

    Attributes:
        shapes: of the file's tensors, by name.
        join: makes the checkpoint's tensor of what its argument returns for a name.
    """

    shapes: Mapping[str, tuple[int, ...]]
    join: Callable[[Read], np.ndarray]


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
                if (form := _piece(file, name, whole, config)) is not None:
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


def _piece(file: GGUFFile, name: str, whole: tuple[int, ...], config: Architecture) -> Piece | None:
    """Return how the file has the tensor ``name`` of a checkpoint, of shape ``whole``; None if it has it as it is."""
    if (layer := _NAME.fullmatch(name)) is None:
        return None
    block, rest = f"blk.{layer[1]}", layer[2]
    if stack := _STACK.fullmatch(rest):
        return _stack(block, stack[1], whole, is_bias=bool(stack[2]))
    if file.metadata["general.architecture"] != "qwen3next":
        return None
    if expert := _EXPERT.fullmatch(rest):
        stacked, index = f"{block}.ffn_{expert[2]}_exps.weight", int(expert[1])
        count = 0 if config.experts is None else config.experts.num_experts
        return Piece({stacked: (count, *whole)}, lambda read: read(stacked, index))
    if rest == "linear_attn.A_log":
        return Piece({f"{block}.ssm_a": whole}, lambda read: _logarithm(read(f"{block}.ssm_a", None), f"{block}.ssm_a"))
    if rest == "linear_attn.in_proj_qkvz.weight" and f"{block}.ssm_in.weight" not in file.tensors:
        return None if config.linear is None else _projections(block, whole, config.linear)
    if rest not in _RESHAPED:
        return None
    ours = f"{block}.{_RESHAPED[rest]}"
    # Without the tensor, the shape that today's converter writes is reported as missing.
    shape = file.tensors[ours].shape if ours in file.tensors else tuple(x for x in whole if x != 1)
    same = math.prod(shape) == math.prod(whole) and [x for x in shape if x != 1] == [x for x in whole if x != 1]
    return Piece({ours: shape if same else whole}, lambda read: read(ours, None).reshape(whole))


def _stack(block: str, kind: str, whole: tuple[int, ...], is_bias: bool) -> Piece:
    """Describe experts of gpt-oss: gate and up, whose numbers alternate in the checkpoint, or down; it has [E, in, out]."""
    parts = ("gate", "up") if kind == "gate_up" else ("down",)
    names = [f"{block}.ffn_{part}_exps.{'bias' if is_bias else 'weight'}" for part in parts]
    flat = whole if is_bias else (whole[0], whole[2], whole[1])

    def join(read: Read) -> np.ndarray:
        each = [read(name, None) for name in names]
        both = each[0] if len(each) == 1 else np.stack(each, axis=2).reshape(len(each[0]), -1, *each[0].shape[2:])
        return both if is_bias else both.swapaxes(1, 2)

    return Piece(dict.fromkeys(names, (flat[0], flat[1] // len(names), *flat[2:])), join)


def _projections(block: str, whole: tuple[int, ...], sizes: LinearLayers) -> Piece:
    """Describe the projections of linear attention; the checkpoint has query, key, values and gates of each head."""
    names, heads, wide = (f"{block}.attn_qkv.weight", f"{block}.attn_gate.weight"), sizes.num_key_heads, whole[1:]

    def join(read: Read) -> np.ndarray:
        mixed, gates = (read(name, None) for name in names)
        keys = heads * sizes.key_dim
        parts = [part.reshape(heads, -1, *wide) for part in (*np.split(mixed, [keys, 2 * keys]), gates)]
        return np.concatenate(parts, axis=1).reshape(-1, *wide)

    rows = heads * sizes.channels, heads * sizes.group * sizes.value_dim
    return Piece({name: (count, *wide) for name, count in zip(names, rows, strict=True)}, join)


def _logarithm(decay: np.ndarray, name: str) -> np.ndarray:
    if not np.all(decay < 0):
        raise ValueError(f"tensor {name} must have numbers below 0")
    return np.log(-decay)
