"""Tensors that a GGUF file has in another form than a Hugging Face checkpoint.

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
from collections.abc import Callable, Mapping

import numpy as np

from ...sizes.architecture import Architecture
from ...sizes.linear import LinearLayers
from .reader import GGUFFile

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


def piece(file: GGUFFile, name: str, whole: tuple[int, ...], config: Architecture) -> Piece | None:
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
