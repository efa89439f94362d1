"""Parameters as tensors of a Hugging Face checkpoint: which tensors make one or a part of it, and how they join and split.

Source: the classes of transformers 5.24, and the files of their models.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

Index = tuple[slice, ...]  # a slice for each dimension
Parts = Callable[[Index], np.ndarray]  # reads a part of a parameter


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter and the file tensors from which it is joined.

    Each file tensor is reshaped to its ``fold``. All are then concatenated along ``axis``, and a matrix is transposed from
    the file's [out, in] to our [in, out]. A name that stands there several times is one file tensor, with the rows of all
    of these parts one after the other.
    """

    path: str  # 'layers_0/attention/qkv/kernel'
    names: tuple[str, ...]  # file tensors, in joining order
    folds: tuple[tuple[int, ...], ...]  # the shape of each while they are joined
    axis: int = 0
    transpose: bool = False
    stack: int = 0  # E: joined matrices are cut into E of equal size, [E, in, out]; 0 = one matrix
    pair: bool = False  # out is gate and up, each on its own: [in, 2, F]
    # For each tensor, which of its channels is channel i here, along axis 2 of its fold or the only axis; () = the same.
    orders: tuple[tuple[int, ...], ...] = ()
    offset: float = 0.0  # the file has the parameter less this number
    gated: bool = False  # every second row of axis 1 of the first fold is a gate, whose channels keep their order

    def file_shape(self, index: int) -> tuple[int, ...]:
        """Compute the shape of tensor ``index`` in the file: [out, in] for a matrix, [N] for a vector."""
        name = self.names[index]
        rows = sum(self._rows(part) for part, other in enumerate(self.names) if other == name)
        return (rows, *self._part_shape(index)[1:])

    def _part_shape(self, index: int) -> tuple[int, ...]:
        fold = self.folds[index]
        # Embeddings are the only matrices that are not transposed; their fold is their shape.
        if self.transpose:
            return (math.prod(fold[:-1]), fold[-1])
        if self.is_taps:
            return (math.prod(fold[:-1]), 1, fold[-1])
        return fold if self.path.endswith("embedding") else (math.prod(fold),)

    @property
    def is_taps(self) -> bool:
        """Whether the parameter is the weights of a convolution [C, W], which the file has as [C, 1, W]."""
        return self.path.endswith("taps")

    def _rows(self, index: int) -> int:
        return self._part_shape(index)[0]

    def _first(self, index: int) -> int:
        """Return the first row of part ``index`` in its file tensor."""
        return sum(self._rows(part) for part in range(index) if self.names[part] == self.names[index])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        if self.is_taps:
            return (sum(math.prod(fold[:-1]) for fold in self.folds), self.folds[0][-1])
        if not self.transpose:
            return self.folds[0] if self.path.endswith("embedding") else (sum(map(math.prod, self.folds)),)
        rows = sum(math.prod(fold[:-1]) for fold in self.folds) // max(1, self.stack)
        columns = (2, rows // 2) if self.pair else (rows,)
        return (*(self.stack,) * bool(self.stack), self.folds[0][-1], *columns)

    @property
    def has_codes(self) -> bool:
        """Whether the parameter can be in 8 or 4 bits: kernels and tables."""
        return self.transpose or self.path.endswith("embedding")

    def join(self, tensors: list[np.ndarray]) -> np.ndarray:
        """Join the file tensors, of NumPy or JAX, into the parameter: a view or one copy, in the file's dtype."""
        parts = [self._own(tensor, index) for index, tensor in enumerate(tensors)]
        folded = [self._ordered(part.reshape(fold), i) for i, (part, fold) in enumerate(zip(parts, self.folds, strict=True))]
        if self.offset:
            folded = [(part.astype(np.float32) + self.offset).astype(part.dtype) for part in folded]
        whole = folded[0] if len(folded) == 1 else folded[0].__array_namespace__().concat(folded, axis=self.axis)
        if self.is_taps:
            return whole.reshape(-1, whole.shape[-1])
        if not self.transpose:
            return whole if self.path.endswith("embedding") else whole.reshape(-1)
        stack = (self.stack,) if self.stack else ()
        turned = whole.reshape(*stack, -1, whole.shape[-1]).swapaxes(-1, -2)
        return turned.reshape(*turned.shape[:-1], 2, -1) if self.pair else turned

    def _own(self, tensor: np.ndarray, index: int) -> np.ndarray:
        """Take the rows of part ``index`` of a whole file tensor."""
        rows, first = self._rows(index), self._first(index)
        return tensor if len(tensor) == rows else tensor[first : first + rows]

    def _ordered(self, part: np.ndarray, index: int, back: bool = False) -> np.ndarray:
        """Put the channels of a part into our order, or back into the file's."""
        order = self.orders[index] if self.orders else ()
        if not order:
            return part
        moved = part.take(np.argsort(order) if back else np.array(order), axis=min(2, part.ndim - 1))
        if self.gated and index == 0:
            moved[:, 1::2] = part[:, 1::2]
        return moved

    def rows(self, tensors: list[np.ndarray]) -> np.ndarray:
        """Join what belongs to the rows of the file's matrices, arrays [out, X]: [N, X], [2, F, X] or, of a table, [V, X]."""
        parts = [self._own(tensor, index) for index, tensor in enumerate(tensors)]
        folded = [
            self._ordered(part.reshape(*fold[:-1], part.shape[-1]), i)
            for i, (part, fold) in enumerate(zip(parts, self.folds, strict=True))
        ]
        whole = np.concatenate(folded, axis=self.axis)
        return whole.reshape(*(2,) * self.pair, -1, whole.shape[-1])

    def part(self, index: Index) -> tuple[Leaf, list[Index]]:
        """Select what to read of the file's tensors for a part of the parameter, and the leaf that joins the slices.

        Args:
            index: as `jax.make_array_from_callback` gives it: all of the parameter, or an equal part of one dimension. The
                dimension is [in] of a matrix, [out] of a matrix (whole KV heads, or a part of F), or the rows of a table.

        Returns:
            The leaf of the part, and for each file tensor the slices to read.
        """
        shapes = [self._part_shape(i) for i in range(len(self.names))]
        first = [self._first(i) for i in range(len(self.names))]
        divided = [dim - len(index) for dim, at in enumerate(index) if at != slice(None)]
        if not divided:
            whole = [(slice(None),) * len(shape) for shape in shapes]
            if len(set(self.names)) < len(self.names):
                whole = [(slice(at, at + shape[0]), *rest[1:]) for at, shape, rest in zip(first, shapes, whole, strict=True)]
            return self, whole
        start, stop = index[divided[0]].start or 0, index[divided[0]].stop
        if self.transpose and not self.pair and divided == [-2]:
            folds = tuple((*fold[:-1], stop - start) for fold in self.folds)
            columns = [(slice(at, at + shape[0]), slice(start, stop)) for at, shape in zip(first, shapes, strict=True)]
            return dataclasses.replace(self, folds=folds), columns
        unit = sum(fold[1] * fold[2] for fold in self.folds) if self.axis else 1  # columns of a KV head
        start, stop = start // unit, stop // unit
        where = []
        for at, shape, fold in zip(first, shapes, self.folds, strict=True):
            rows = shape[0] // fold[0]  # rows of the file for one row of the fold
            where.append((slice(at + start * rows, at + stop * rows), *[slice(None)] * (len(shape) - 1)))
        return dataclasses.replace(self, folds=tuple((stop - start, *fold[1:]) for fold in self.folds)), where

    def split(self, param: np.ndarray) -> dict[str, np.ndarray]:
        """Split the parameter into contiguous file tensors, by name: the inverse of `join`."""
        sizes = [fold[self.axis] for fold in self.folds]
        joined = (*self.folds[0][: self.axis], sum(sizes), *self.folds[0][self.axis + 1 :])
        flat = param.reshape(*param.shape[:-2], -1) if self.pair else param
        turned = flat.swapaxes(-1, -2) if self.transpose else flat
        whole = turned.reshape(joined)
        parts = np.split(whole, np.cumsum(sizes)[:-1], axis=self.axis)
        if self.offset:
            parts = [(part.astype(np.float32) - self.offset).astype(part.dtype) for part in parts]
        parts = [self._ordered(part, i, back=True).reshape(self._part_shape(i)) for i, part in enumerate(parts)]
        grouped: dict[str, list[np.ndarray]] = {}
        for name, part in zip(self.names, parts, strict=True):
            grouped.setdefault(name, []).append(part)
        wholes = {name: np.concatenate(group) if group[1:] else group[0] for name, group in grouped.items()}
        return {name: np.ascontiguousarray(whole) for name, whole in wholes.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedLeaf:
    """A parameter of which the file has all experts in one tensor; it has the functions of `Leaf`.

    The file has the experts first, and behind them a matrix, which is [in, out] (gpt-oss) or [out, in] (Granite). Gate and up
    are neighbours in ``out``, or one is behind the other.
    """

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
        """Select what to read of the tensor for a part of the parameter, and the leaf that makes the part of it."""
        place, cut = list(index), self.cut
        if self.gates:
            *place, _, inner = place
            if self.gates == "neighbours" and inner != slice(None):
                inner = slice(2 * (inner.start or 0), 2 * inner.stop)
            elif self.gates == "halves":
                inner, cut = slice(None), inner
            place.append(inner)
        if self.turned:
            place[-1], place[-2] = place[-2], place[-1]
        return dataclasses.replace(self, cut=cut), [tuple(place)]

    def split(self, param: np.ndarray) -> dict[str, np.ndarray]:
        """Make the file tensor of the parameter, by name: the inverse of `join`."""
        whole = param.swapaxes(-1, -2) if self.gates == "neighbours" else param
        whole = whole.reshape(*whole.shape[:-2], -1) if self.gates else whole
        return {self.names[0]: np.ascontiguousarray(whole.swapaxes(-1, -2) if self.turned else whole)}


AnyLeaf = Leaf | StackedLeaf
