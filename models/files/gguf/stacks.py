"""Experts of gpt-oss in a GGUF file: gate and up are tensors of their own there, and every matrix is [E, out, in]."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np

# Reads a tensor of the file by its name; or, with a number, one matrix of a stack of matrices.
Read = Callable[[str, int | None], np.ndarray]
_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?")


@dataclasses.dataclass(frozen=True)
class Stack:
    """The tensors of a GGUF file that are one tensor of a Hugging Face checkpoint.

    Attributes:
        names: of the file: gate and up, whose numbers alternate in the checkpoint; or one.
        turned: whether the checkpoint has [E, in, out].
    """

    names: tuple[str, ...]
    turned: bool

    def shapes(self, whole: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor in the file, for the shape that the checkpoint's tensor has."""
        flat = (whole[0], whole[2], whole[1]) if self.turned else whole
        each = (flat[0], flat[1] // len(self.names), *flat[2:])
        return dict.fromkeys(self.names, each)

    def join(self, read: Read) -> np.ndarray:
        """Make the checkpoint's tensor of what ``read`` returns for each name."""
        parts = [read(name, None) for name in self.names]
        both = parts[0] if len(parts) == 1 else np.stack(parts, axis=2).reshape(len(parts[0]), -1, *parts[0].shape[2:])
        return both.swapaxes(1, 2) if self.turned else both


def stacked(name: str) -> Stack | None:
    """Return the tensors of the file for a tensor of a checkpoint; None if it is one of the file's, too."""
    found = _EXPERTS.fullmatch(name)
    if found is None:
        return None
    layer, kind, bias = found.groups()
    parts = ("gate", "up") if kind == "gate_up" else ("down",)
    return Stack(tuple(f"blk.{layer}.ffn_{part}_exps.{'bias' if bias else 'weight'}" for part in parts), not bias)
