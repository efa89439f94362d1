"""Parameters of which a checkpoint's file has all experts in one tensor: how to join and split them.

The files have the experts first, and behind them a matrix, which is [in, out] (gpt-oss) or [out, in] (Granite). Gate and up
are neighbours in ``out``, or one is behind the other.

Source: the classes of transformers 5.24, and the files of their models.
"""

from __future__ import annotations

import dataclasses

import numpy as np

Index = tuple[slice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedLeaf:
    """A parameter that is one tensor of the file; it has the functions of `models.files.tables.checkpoint.Leaf`."""

    path: str  # 'layers_0/mlp/gate_up/kernel'
    names: tuple[str, ...]  # the file tensor
    shape: tuple[int, ...]  # of the parameter; with gate and up, [..., 2, F]
    gates: str = ""  # gate and up in the file's out: "neighbours", "halves", or "" where the parameter has none
    turned: bool = False  # the file has [E, out, in]
    cut: slice = slice(None)  # what is kept of F, where `part` had to read all of it

    offset = 0.0  # no norm is among them
    has_codes = False  # experts are floating-point numbers

    def file_shape(self, index: int) -> tuple[int, ...]:
        """Compute the shape of the tensor in the file."""
        flat = (*self.shape[:-2], 2 * self.shape[-1]) if self.gates else self.shape
        return (*flat[:-2], flat[-1], flat[-2]) if self.turned else flat

    def join(self, tensors: list[np.ndarray]) -> np.ndarray:
        """Make the parameter of its file tensor, in the file's dtype."""
        whole = tensors[0].swapaxes(-1, -2) if self.turned else tensors[0]
        if self.gates == "neighbours":
            return whole.reshape(*whole.shape[:-1], -1, 2).swapaxes(-1, -2)
        return whole.reshape(*whole.shape[:-1], 2, -1)[..., self.cut] if self.gates else whole

    def part(self, index: Index) -> tuple[StackedLeaf, list[Index]]:
        """Select what to read of the tensor for a part of the parameter, and the leaf that makes the part of it.

        Args:
            index: a slice for each dimension of the parameter; at most F, or the in of ``down``, is a part.
        """
        own, cut = list(index), self.cut
        if self.gates:
            *own, _, inner = own
            if self.gates == "neighbours" and inner != slice(None):
                inner = slice(2 * (inner.start or 0), 2 * inner.stop)
            elif self.gates == "halves":
                inner, cut = slice(None), inner
            own.append(inner)
        if self.turned:
            own[-1], own[-2] = own[-2], own[-1]
        return dataclasses.replace(self, cut=cut), [tuple(own)]

    def split(self, param: np.ndarray) -> dict[str, np.ndarray]:
        """Make the file tensor of the parameter, by name: the inverse of `join`."""
        whole = param.swapaxes(-1, -2) if self.gates == "neighbours" else param
        whole = whole.reshape(*whole.shape[:-2], -1) if self.gates else whole
        return {self.names[0]: np.ascontiguousarray(whole.swapaxes(-1, -2) if self.turned else whole)}
