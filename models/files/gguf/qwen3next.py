"""GGUF files of Qwen3-Next: what their metadata says, and their tensors as tensors of a Hugging Face checkpoint.

llama.cpp writes the projections of a layer of linear attention without groups: all queries, all keys and all values in one
tensor, and the output gates in another. It writes the decay as -exp(A_log), the convolution without its axis of one, and the
experts of a layer in three tensors. Older files have the projections in one tensor, in the checkpoint's order. Value heads
stay beside the key head that they share; llama.cpp re-orders them in other architectures only.

Sources: llama.cpp's ``conversion/qwen.py`` (``Qwen3NextModel``), which writes the files, and ``src/models/qwen3next.cpp``,
which reads them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...sizes.linear import LinearLayers
from .reader import GGUFFile
from .stacks import Read

ARCHITECTURE = "qwen3next"
KEYS = ("expert_count", "nextn_predict_layers")  # keys that can change the arithmetic, and that `declared` reads
_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")
_BLOCK = re.compile(r"blk\.(\d+)\..*")
_COUNTS = {  # key after the architecture's name -> key of config.json
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_INNER, _ROTATED, _INTERVAL = "ssm.inner_size", "rope.dimension_count", "full_attention_interval"
_NEUTRAL: dict[str, tuple] = {  # what llama.cpp does whatever the file says, or what only other models have
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (1,),
    "expert_group_count": (0, 1),
    "attention.recurrent_layers": (),
}


def declared(file: GGUFFile, number: Any, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Write the metadata of a file as keys of ``config.json``, beside the sizes that files of all architectures have.

    Raises:
        ValueError: keys are missing (the message names all of them), a value is no positive whole number, or the file asks
            for something that no model of this architecture has.
    """
    needed = (*_COUNTS, _INNER, _ROTATED)
    absent = [f"{ARCHITECTURE}.{key}" for key in needed if number(key) is None]
    if absent:
        raise ValueError(f"the file lacks {', '.join(absent)}")
    for key, neutral in _NEUTRAL.items():
        value = file.metadata.get(f"{ARCHITECTURE}.{key}")
        if value is not None and value not in neutral:
            expected = " or ".join(map(str, neutral)) or "none"
            raise ValueError(f"unsupported {ARCHITECTURE}.{key}={value!r:.60}, expected {expected}")
    every = 4 if number(_INTERVAL) is None else number(_INTERVAL)  # llama.cpp's default
    for key, value in {**{key: number(key) for key in needed}, _INTERVAL: every}.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{ARCHITECTURE}.{key} must be a positive whole number, got {value!r:.60}")
    inner, heads = number(_INNER), number("ssm.time_step_rank")
    if inner % heads:
        raise ValueError(
            f"{ARCHITECTURE}.{_INNER} must be a multiple of {ARCHITECTURE}.ssm.time_step_rank, got {inner} and {heads}"
        )
    return {
        "model_type": "qwen3_next",
        **{key: number(ours) for ours, key in _COUNTS.items()},
        "linear_value_head_dim": inner // heads,
        "full_attention_interval": every,
        "partial_rotary_factor": number(_ROTATED) / sizes["head_dim"],
        "norm_topk_prob": True,
    }


def predicting(file: GGUFFile, arch: str, blocks: int) -> int:
    """Return how many of the file's last layers only predict tokens after the next: they are not read.

    Args:
        file: the open file.
        arch: its architecture; files of other architectures have no such layers.
        blocks: all layers of the file.

    Raises:
        ValueError: the number is no whole number from 0 on and below ``blocks``.
    """
    value = file.metadata.get(f"{ARCHITECTURE}.nextn_predict_layers", 0) if arch == ARCHITECTURE else 0
    if type(value) is not int or not 0 <= value < max(1, blocks):
        raise ValueError(
            f"{ARCHITECTURE}.nextn_predict_layers must be a whole number of at least 0 and below the block_count {blocks}, "
            f"got {value!r:.60}"
        )
    return value


def is_read(file: GGUFFile, name: str, layers: int) -> bool:
    """Tell whether a tensor is read; tensors of layers that only predict, which come after the first ``layers``, are not."""
    block = _BLOCK.fullmatch(name)
    own = file.metadata["general.architecture"] == ARCHITECTURE
    more = file.metadata.get(f"{ARCHITECTURE}.nextn_predict_layers", 0) if own else 0
    return block is None or not layers <= int(block[1]) < layers + more


@dataclasses.dataclass(frozen=True)
class Expert:
    """A matrix of one expert; the file has a layer's experts in one tensor [E, out, in]."""

    names: tuple[str, ...]
    index: int
    count: int  # E

    def shapes(self, whole: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shape of the file's tensor, for the shape that the checkpoint's tensor has."""
        return {self.names[0]: (self.count, *whole)}

    def join(self, read: Read) -> np.ndarray:
        """Read the expert's matrix alone."""
        return read(self.names[0], self.index)


@dataclasses.dataclass(frozen=True)
class Projections:
    """The projections of a layer of linear attention, which the checkpoint has in the order of key heads."""

    names: tuple[str, ...]  # of queries, keys and values, and of output gates
    sizes: LinearLayers

    def shapes(self, whole: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of both tensors, for the shape that the checkpoint's tensor has."""
        heads = self.sizes.num_key_heads
        gates = heads * self.sizes.group * self.sizes.value_dim
        return dict(zip(self.names, ((heads * self.sizes.channels, *whole[1:]), (gates, *whole[1:])), strict=True))

    def join(self, read: Read) -> np.ndarray:
        """Put the rows of each key head side by side: query, key, values, gates."""
        heads, wide = self.sizes.num_key_heads, self.sizes.num_key_heads * self.sizes.key_dim
        mixed, gates = (read(name, None) for name in self.names)
        parts = [part.reshape(heads, -1, mixed.shape[-1]) for part in (*np.split(mixed, [wide, 2 * wide]), gates)]
        return np.concatenate(parts, axis=1).reshape(-1, mixed.shape[-1])


@dataclasses.dataclass(frozen=True)
class Reshaped:
    """A tensor whose axes of one the file may leave out: a convolution [C, 1, W], the gate [1, d] of a shared expert."""

    names: tuple[str, ...]
    found: tuple[int, ...]  # the shape in the file
    whole: tuple[int, ...]

    def shapes(self, whole: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the file's own shape if it is ``whole`` up to axes of one, else ``whole``."""
        same = [x for x in self.found if x != 1] == [x for x in whole if x != 1]
        return {self.names[0]: self.found if same else whole}

    def join(self, read: Read) -> np.ndarray:
        """Read the tensor in the checkpoint's shape."""
        return read(self.names[0], None).reshape(self.whole)


@dataclasses.dataclass(frozen=True)
class Decay:
    """The logarithm of a decay's rate; the file has the decay, -exp(A_log)."""

    names: tuple[str, ...]

    def shapes(self, whole: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shape, which is the same in both."""
        return {self.names[0]: whole}

    def join(self, read: Read) -> np.ndarray:
        """Take the logarithm of a float32 tensor.

        Raises:
            ValueError: a number is not below 0.
        """
        decay = read(self.names[0], None)
        if not np.all(decay < 0):
            raise ValueError(f"tensor {self.names[0]} must have numbers below 0")
        return np.log(-decay)


Piece = Expert | Projections | Reshaped | Decay


def piece(file: GGUFFile, name: str, whole: tuple[int, ...], experts: int, linear: LinearLayers | None) -> Piece | None:
    """Return how the file has a tensor of a checkpoint that it does not have as it is.

    Args:
        file: the open file.
        name: of the checkpoint.
        whole: the shape in the checkpoint.
        experts: E of each layer.
        linear: the sizes of layers of linear attention.

    Returns:
        None if the file has the tensor as it is, under another name.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    block, rest = f"blk.{found[1]}", found[2]
    expert = _EXPERT.fullmatch(rest)
    if expert is not None:
        return Expert((f"{block}.ffn_{expert[2]}_exps.weight",), int(expert[1]), experts)
    if rest == "linear_attn.A_log":
        return Decay((f"{block}.ssm_a",))
    if (
        rest == "linear_attn.in_proj_qkvz.weight"
        and linear is not None
        and f"{block}.ssm_in.weight" not in file.tensors
    ):
        return Projections((f"{block}.attn_qkv.weight", f"{block}.attn_gate.weight"), linear)
    ours = {
        "linear_attn.conv1d.weight": "ssm_conv1d.weight",
        "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
        "linear_attn.dt_bias": "ssm_dt.bias",
    }.get(rest)
    if ours is None:
        return None
    stored = file.tensors.get(f"{block}.{ours}")
    # Without the tensor, the shape that today's converter writes is reported as missing.
    shape = tuple(x for x in whole if x != 1) if stored is None else stored.shape
    return Reshaped((f"{block}.{ours}",), shape, whole)
